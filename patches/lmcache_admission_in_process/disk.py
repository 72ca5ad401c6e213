"""The local disk: a folder for each engine, and a seal behind each object."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from patches.framework import tallies
from patches.framework.records import Seam
from patches.lmcache_admission import scratch
from patches.lmcache_admission.room import Sealed, has_room
from patches.lmcache_admission.seal import difference

__all__ = ["key_to_path", "load", "load_batch", "load_into", "save"]

logger = logging.getLogger(__name__)

TIER = "local_disk"
_FOLDER = "splint_folder"
_lock = threading.Lock()


def key_to_path(seam: Seam) -> Callable[..., str]:
    """Each engine writes below a folder of its own: stock's names are the same for all engines of one configuration."""
    original = seam.original

    @wraps(original)
    def path(self: Any, key: Any) -> str:
        seam.count()
        folder, name = os.path.split(original(self, key))
        with _lock:
            if _FOLDER not in vars(self):
                vars(self)[_FOLDER] = scratch.make(Path(folder))
        return str(Path(folder, vars(self)[_FOLDER], name))

    return path


def save(seam: Seam) -> Callable[..., None]:
    """Write the seal with the object. What can't carry one, or does not fit onto the disk, is not stored."""
    original = seam.original

    @wraps(original)
    def saved(self: Any, key: Any, memory_obj: Any, on_complete_callback: Any = None) -> None:
        seam.count()
        if not has_room(memory_obj):
            _not_stored(self, key, memory_obj, "no room for a seal behind the object")
            return
        view = Sealed(key, memory_obj)
        view.seal()
        try:
            original(self, key, view, on_complete_callback)
        except OSError as error:
            Path(self._key_to_path(key)).unlink(missing_ok=True)
            _not_stored(self, key, memory_obj, str(error))

    return saved


def _not_stored(backend: Any, key: Any, memory_obj: Any, reason: str) -> None:
    logger.warning("Not stored on the local disk: %s", reason)
    backend.current_cache_size -= memory_obj.get_physical_size()
    memory_obj.ref_count_down()
    backend.disk_worker.remove_put_task(key)


def load_into(seam: Seam) -> Callable[..., Any]:
    """Read an object and its seal; give nothing where they do not belong together."""
    original = seam.original

    @wraps(original)
    def loaded(self: Any, key: Any, path: str | None, memory_obj: Any) -> Any:
        seam.count()
        if memory_obj is None or path is None or not has_room(memory_obj):
            return None if memory_obj is None else _given_back(memory_obj)
        view = Sealed(key, memory_obj)
        if original(self, key, path, view) is None:
            return None
        if (reason := _difference(view, path)) is None:
            return memory_obj
        _refuse(self, key, reason)
        return _given_back(memory_obj)

    return loaded


def load(seam: Seam) -> Callable[..., Any]:
    """Like a batch of one."""

    @wraps(seam.original)
    def loaded(self: Any, key: Any, path: str, **layout: Any) -> Any:
        seam.count()
        found = self.local_cpu_backend.allocate(layout["shape"], layout["dtype"], layout["fmt"])
        return self._load_chunk_into_memory(key, path, found)

    return loaded


def load_batch(seam: Seam) -> Callable[..., list[Any]]:
    """Objects up to the first that is not what its key stands for; the rest is given back."""
    original = seam.original

    @wraps(original)
    def loaded(self: Any, paths: list[str], keys: list[Any], memory_objs: list[Any], write_back: bool = False) -> Any:
        seam.count()
        views = [Sealed(key, found) for key, found in zip(keys, memory_objs, strict=False)]
        original(self, paths, keys, views, write_back)
        good = 0
        for key, path, view in zip(keys, paths, views, strict=False):
            if (reason := _difference(view, path)) is not None:
                _refuse(self, key, reason)
                break
            good += 1
        for found in memory_objs[good:]:
            found.unpin()
            found.ref_count_down()
        return memory_objs[:good]

    return loaded


def _difference(view: Sealed, path: str) -> str | None:
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        return "gone"
    return "wrong_size" if size != view.get_size() else difference(view.expected(), view.found())


def _refuse(backend: Any, key: Any, reason: str) -> None:
    tallies.miss(reason, TIER, "what is stored there is not what the key stands for; it is not used")
    try:
        backend.remove(key)
    except FileNotFoundError:
        logger.debug("the file of a refused object is gone already")


def _given_back(memory_obj: Any) -> None:
    memory_obj.ref_count_down()
