"""A second-level tier of the LMCache server with a seal behind every object.

LMCache's server loads objects from its second level into the first before it answers a look-up. What fails its check
here is therefore a miss for the engine, never a failed load.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.platform import consume_fd, create_event_notifier

from patches.framework import tallies
from patches.lmcache_admission.batches import Batch, Task, split
from patches.lmcache_admission.checking import GONE, KEPT, NOT_LOADED, refused
from patches.lmcache_admission.delegating import Delegating
from patches.lmcache_admission.room import Sealed, has_room
from patches.lmcache_admission.scratch import flush, remove
from patches.lmcache_admission.seal import NO_SERDE

__all__ = ["Folder", "SealedL2Adapter"]

logger = logging.getLogger(__name__)

_POLL_MS = 500
CHECKERS = min(4, os.cpu_count() or 1)
"""Threads that make sums; each makes about 12 GB/s where nothing else wants the core."""


@dataclass(frozen=True)
class Folder:
    """A tier that is a folder.

    Attributes:
        file_of: From a key to its file.
        aligned: Whether it needs whole slots (``O_DIRECT``).
        scratch: Folder of its temporary files, removed with it.
        flushes: Whether files are on the disk before their store is done.
    """

    file_of: Callable[[Any], Path]
    aligned: bool
    scratch: Path
    flushes: bool


class SealedL2Adapter(Delegating):
    """Stores and loads through ``inner``; what comes back without its seal is not loaded, and is deleted.

    Args:
        inner: LMCache's adapter of the tier.
        tier: Its name in LMCache's configuration, for counters.
        folder: What there is to know of a tier that is a folder.
        serde: Of the serde that LMCache puts around the tier, what :func:`~patches.lmcache_admission.serdes.digest`
            gave: what another one made is not loaded.
    """

    def __init__(self, inner: Any, tier: str, folder: Folder | None = None, *, serde: bytes = NO_SERDE) -> None:
        super().__init__(inner)
        self._serde = serde
        self._tier, self._folder = tier, folder
        self._file_of = folder.file_of if folder else None
        self._aligned = folder is not None and folder.aligned
        self._store_done, self._load_done = create_event_notifier(), create_event_notifier()
        self._lock = threading.Lock()
        self._number = 0
        self._stores: dict[int, Batch] = {}
        self._loads: dict[int, Batch] = {}
        self._stored: dict[int, Any] = {}
        self._loaded: dict[int, Any] = {}
        self._stop = threading.Event()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="splint-seal")
        self._checkers = ThreadPoolExecutor(max_workers=CHECKERS, thread_name_prefix="splint-check")
        self._poller = threading.Thread(target=self._poll, name="splint-seal-poll", daemon=True)
        self._poller.start()

    def get_store_event_fd(self) -> int:
        """Signalled when a store has ended."""
        return int(self._store_done.fileno())

    def get_load_event_fd(self) -> int:
        """Signalled when a load has been checked."""
        return int(self._load_done.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Seal and store; objects that have no room for a seal fail the task."""
        task = self._new_task()
        if not keys:
            self._finish_store(task, L2StoreResult(True, 0))
        elif all(has_room(found) for found in objects):
            self._worker.submit(self._seal_and_store, self._split(task, keys, objects))
        else:
            logger.error("No room for a seal behind %d object(s) for the %s tier: not stored", len(keys), self._tier)
            self._finish_store(task, L2StoreResult(False, 0))
        return task.number

    def _split(self, task: Task, keys: list[Any], objects: list[Any]) -> list[Batch]:
        return split(task, keys, objects, aligned=self._aligned, serde=self._serde)

    def _seal_and_store(self, batches: list[Batch]) -> None:
        for batch in batches:
            try:
                for _ in self._checkers.map(Sealed.seal, batch.views):
                    pass
                with self._lock:
                    self._stores[self.inner_adapter.submit_store_task(batch.keys, batch.views)] = batch
            except Exception:
                logger.exception("A store was not handed to the %s tier", self._tier)
                self._batch_stored(batch, L2StoreResult(False, 0))

    def _batch_stored(self, batch: Batch, result: Any) -> None:
        task = batch.task
        with self._lock:
            task.left -= 1
            task.ok &= result.is_successful()
            task.stored_bytes += result.bytes_transferred()
            last = not task.left
        if last:
            self._finish_store(task, L2StoreResult(task.ok, task.stored_bytes))

    def _finish_store(self, task: Task, result: Any) -> None:
        with self._lock:
            self._stored[task.number] = result
        self._store_done.notify()

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """LMCache's result by number of the task, once."""
        with self._lock:
            done, self._stored = self._stored, {}
        return done

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Load and check; only what has its seal is reported as loaded."""
        task = self._new_task()
        task.loaded = Bitmap(len(keys))
        if not all(has_room(found) for found in objects):
            self._miss("no_room", len(keys))
            self._finish_load(task)
            return task.number
        if not keys:
            self._finish_load(task)
        with self._lock:
            for batch in self._split(task, keys, objects):
                self._loads[self.inner_adapter.submit_load_task(batch.keys, batch.views)] = batch
        return task.number

    def _batch_loaded(self, batch: Batch, loaded: Any) -> None:
        """Check a batch, in a thread of its own: the sums are made without the interpreter's lock."""
        try:
            bad = dict(refused(batch, loaded, self._file_of))
        except Exception:
            logger.exception("What the %s tier has loaded could not be checked, and is not used", self._tier)
            bad = dict.fromkeys(range(len(batch.keys)), NOT_LOADED)
        for reason in set(bad.values()):
            self._miss(reason, list(bad.values()).count(reason))
        gone = [batch.keys[place] for place, reason in bad.items() if reason not in (GONE, KEPT, NOT_LOADED)]
        if gone:
            self._worker.submit(self.inner_adapter.delete, gone)
        with self._lock:
            for place in set(range(len(batch.keys))) - set(bad):
                batch.task.loaded.set(batch.first + place)
            batch.task.left -= 1
            last = not batch.task.left
        if last:
            self._finish_load(batch.task)

    def _miss(self, reason: str, count: int) -> None:
        tallies.miss(reason, self._tier, "what is stored there is not what the key stands for; it is not used", count)

    def _finish_load(self, task: Task) -> None:
        with self._lock:
            self._loaded[task.number] = task.loaded
        self._load_done.notify()

    def query_load_result(self, task_id: int) -> Any:
        """LMCache's bitmap over the task's keys, once; None while it is not known."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    def _new_task(self) -> Task:
        with self._lock:
            self._number += 1
            return Task(self._number, 0)

    def _poll(self) -> None:
        stores, loads = self.inner_adapter.get_store_event_fd(), self.inner_adapter.get_load_event_fd()
        poller = select.poll()
        poller.register(stores, select.POLLIN)
        poller.register(loads, select.POLLIN)
        while not self._stop.is_set():
            for ready, _ in poller.poll(_POLL_MS):
                consume_fd(ready)
                try:
                    (self._drain_stores if ready == stores else self._drain_loads)()
                except Exception:
                    logger.exception("What the %s tier has finished could not be taken up", self._tier)

    def _drain_stores(self) -> None:
        for number, result in self.inner_adapter.pop_completed_store_tasks().items():
            with self._lock:
                batch = self._stores.pop(number)
            if self._folder and self._folder.flushes and result.is_successful():
                self._checkers.submit(self._flush_batch, batch, result)
            else:
                self._batch_stored(batch, result)

    def _flush_batch(self, batch: Batch, result: Any) -> None:
        try:
            flush([self._file_of(key) for key in batch.keys] if self._file_of else [])
        except OSError:
            logger.exception("A store into the %s tier is not on the disk", self._tier)
            result = L2StoreResult(False, 0)
        self._batch_stored(batch, result)

    def _drain_loads(self) -> None:
        with self._lock:
            pending = list(self._loads)
        for number in pending:
            loaded = self.inner_adapter.query_load_result(number)
            if loaded is not None:
                with self._lock:
                    batch = self._loads.pop(number)
                self._checkers.submit(self._batch_loaded, batch, loaded)

    def close(self) -> None:
        """End the threads, then the tier."""
        self._worker.shutdown(wait=True)
        self._stop.set()
        self._poller.join()
        self._checkers.shutdown(wait=True)
        self.inner_adapter.close()
        if self._folder is not None:
            remove(self._folder.scratch)
        self._store_done.close()
        self._load_done.close()
