"""A client of Redis and its like, in the place of LMCache's native one, which loses its step.

The native client leaves the bytes of an answer of another size in the connection, reads them as the next answer, and
waits for ever; after a restart of the server it never connects again. This one gives a server up that is silent for a
second, and then asks it with one batch in a while, so that look-ups behind it are misses at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lmcache.v1.platform import create_event_notifier

from patches.lmcache_admission.resp_wire import CONNECT_S, SILENT_S, Connection, command

__all__ = ["RespClient"]

logger = logging.getLogger(__name__)

AHEAD = 8
"""Values that are asked for before the first of them has come: the server holds as many."""
RETRY_S = 1.0
"""Between two attempts to use a server that could not be reached or was silent; all else fails at once meanwhile."""

_Exchange = Callable[[Connection], Iterator[bool]]


class RespClient:
    """What LMCache asks of a native client: batches, and their results once the descriptor is readable.

    Args:
        host: Name or address of the server.
        port: TCP port.
        num_workers: Threads, each with a connection of its own.
        username: For ``AUTH``; may be empty.
        password: For ``AUTH``; may be empty.
    """

    def __init__(self, host: str, port: int, num_workers: int = 8, username: str = "", password: str = "") -> None:
        self._address = (host, int(port))
        self._credentials = tuple(word for word in (username, password) if word) if password else ()
        self._workers = int(num_workers)
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(max_workers=self._workers, thread_name_prefix="splint-resp")
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._number = 0
        self._done: list[tuple[int, bool, str, list[bool]]] = []
        self._unusable_until = 0.0
        self._connections: list[Connection] = []

    def event_fd(self) -> int:
        """Readable when :meth:`drain_completions` has something."""
        return int(self._notifier.fileno())

    def submit_batch_get(self, keys: Sequence[str], targets: Sequence[Any]) -> int:
        """Fill each target with the value of its key; a value of another size is no value."""
        views = [memoryview(target).cast("B") for target in targets]

        def exchange(part: slice) -> _Exchange:
            def run(connection: Connection) -> Iterator[bool]:
                for first in range(part.start, part.stop, AHEAD):
                    some = slice(first, min(first + AHEAD, part.stop))
                    connection.send([b"".join(command("GET", key) for key in keys[some])])
                    yield from (connection.into(view) for view in views[some])

            return run

        return self._submit(len(keys), exchange)

    def submit_batch_set(self, keys: Sequence[str], values: Sequence[Any]) -> int:
        """Store each value under its key."""
        views = [memoryview(value).cast("B") for value in values]

        def exchange(part: slice) -> _Exchange:
            def run(connection: Connection) -> Iterator[bool]:
                for key, view in zip(keys[part], views[part], strict=True):
                    name = key.encode()
                    head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(view))
                    connection.send([head, view, b"\r\n"])
                    yield connection.done()

            return run

        return self._submit(len(keys), exchange, all_or_error=True)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Ask for each key whether it is there."""
        return self._submit(len(keys), lambda part: _counting("EXISTS", keys[part]))

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Delete each key."""
        return self._submit(len(keys), lambda part: _counting("DEL", keys[part]))

    def drain_completions(self) -> list[tuple[int, bool, str, list[bool]]]:
        """Number, whether the whole batch was done, the last error, and each key's result; every batch once."""
        self._notifier.consume()
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """End the threads and their connections."""
        self._pool.shutdown(wait=True)
        for connection in self._connections:
            connection.close()
        self._notifier.close()

    def _submit(self, count: int, exchange: Callable[[slice], _Exchange], *, all_or_error: bool = False) -> int:
        """Deal a batch out to the threads. With ``all_or_error`` one key that is not done fails the batch."""
        with self._lock:
            self._number += 1
            number = self._number
        parts = [slice(*bounds) for bounds in _bounds(count, self._workers)]
        results, errors, left = [False] * count, [""], [len(parts)]

        def finished(_: Future[None]) -> None:
            with self._lock:
                left[0] -= 1
                if left[0]:
                    return
                if all_or_error and not all(results):
                    errors[0] = errors[0] or "the server refused a value"
                self._done.append((number, not errors[0], errors[0], results))
            self._notifier.notify()

        for part in parts:
            self._pool.submit(self._run, exchange(part), part, results, errors).add_done_callback(finished)
        return number

    def _run(self, exchange: _Exchange, part: slice, results: list[bool], errors: list[str]) -> None:
        """One exchange on this thread's connection, once more where the connection turns out to be an old one."""
        if not self._admitted():
            errors[0] = "the server could not be used a moment ago"
            return
        for last in (False, True):
            fresh = getattr(self._local, "connection", None) is None
            try:
                for place, done in enumerate(exchange(self._connection()), part.start):
                    results[place] = done
            except (OSError, ValueError) as error:
                self._drop()
                results[part] = [False] * (part.stop - part.start)
                silent = isinstance(error, TimeoutError)
                if silent:
                    self._unusable(error)
                if last or fresh or silent:
                    errors[0] = str(error) or type(error).__name__
                    return
            else:
                self._usable()
                return

    def _admitted(self) -> bool:
        """Whether the server may be asked; of a server that could not be used, one batch in a while finds it out."""
        with self._lock:
            now = time.monotonic()
            if now < self._unusable_until:
                return False
            if self._unusable_until:
                self._unusable_until = now + CONNECT_S + SILENT_S
            return True

    def _unusable(self, error: Exception) -> None:
        with self._lock:
            known, self._unusable_until = self._unusable_until, time.monotonic() + RETRY_S
        if not known:
            logger.warning("Redis at %s:%d can't be used: %s", *self._address, error)

    def _usable(self) -> None:
        with self._lock:
            known, self._unusable_until = self._unusable_until, 0.0
        if known:
            logger.warning("Redis at %s:%d is used again", *self._address)

    def _connection(self) -> Connection:
        if getattr(self._local, "connection", None) is None:
            try:
                self._local.connection = Connection(*self._address, self._credentials)
                self._connections.append(self._local.connection)
            except OSError as error:
                self._unusable(error)
                raise
        return self._local.connection  # type: ignore[no-any-return]

    def _drop(self) -> None:
        connection, self._local.connection = getattr(self._local, "connection", None), None
        if connection is not None:
            self._connections.remove(connection)
            connection.close()


def _counting(name: str, keys: Sequence[str]) -> _Exchange:
    def run(connection: Connection) -> Iterator[bool]:
        connection.send([b"".join(command(name, key) for key in keys)])
        return (connection.integer() == 1 for _ in keys)

    return run


def _bounds(count: int, workers: int) -> Iterator[tuple[int, int]]:
    """A batch of nothing is one part, so that it has an answer."""
    size = -(-count // workers) or 1
    for first in range(0, max(count, 1), size):
        yield first, min(first + size, count)
