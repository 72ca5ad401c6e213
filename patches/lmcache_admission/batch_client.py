"""What LMCache asks of a native client, for clients in Python: batches, and their results once a descriptor tells."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from lmcache.v1.platform import create_event_notifier

__all__ = ["BatchClient"]

_Work = Callable[[slice, list[bool]], str]
"""Does a part of a batch: notes for each of its places whether it was done, and says what went wrong, or nothing."""


class BatchClient:
    """Deals batches out to threads.

    Args:
        num_workers: How many.
        name: Of the threads.
    """

    def __init__(self, num_workers: int, name: str) -> None:
        self._workers = int(num_workers)
        self._pool = ThreadPoolExecutor(max_workers=self._workers, thread_name_prefix=name)
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._number = 0
        self._done: list[tuple[int, bool, str, list[bool]]] = []

    def event_fd(self) -> int:
        """Readable when :meth:`drain_completions` has something."""
        return int(self._notifier.fileno())

    def drain_completions(self) -> list[tuple[int, bool, str, list[bool]]]:
        """Number, whether the whole batch was done, the last error, and each key's result; every batch once."""
        self._notifier.consume()
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True)
        self._notifier.close()

    def _submit(self, count: int, work: _Work, *, all_or_error: bool = False) -> int:
        """Deal a batch out. With ``all_or_error`` one key that is not done fails the batch."""
        with self._lock:
            self._number += 1
            number = self._number
        parts = [slice(*bounds) for bounds in _bounds(count, self._workers)]
        results, errors, left = [False] * count, [""], [len(parts)]

        def run(part: slice) -> None:
            errors[0] = work(part, results) or errors[0]

        def finished(_: Future[None]) -> None:
            with self._lock:
                left[0] -= 1
                if left[0]:
                    return
                if all_or_error and not all(results):
                    errors[0] = errors[0] or "a value was refused"
                self._done.append((number, not errors[0], errors[0], results))
            self._notifier.notify()

        for part in parts:
            self._pool.submit(run, part).add_done_callback(finished)
        return number


def _bounds(count: int, workers: int) -> Iterator[tuple[int, int]]:
    """A batch of nothing is one part, so that it has an answer."""
    size = -(-count // workers) or 1
    for first in range(0, max(count, 1), size):
        yield first, min(first + size, count)
