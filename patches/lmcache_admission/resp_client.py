"""A client of Redis and its like, in the place of LMCache's native one, which loses its step.

The native client leaves the bytes of an answer of another size in the connection, reads them as the next answer, and
waits for ever; after a restart of the server it never connects again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from patches.lmcache_admission.batch_client import BatchClient
from patches.lmcache_admission.resp_wire import Connection, command
from patches.lmcache_admission.streaming import Streamed, outgoing

__all__ = ["RespClient"]

logger = logging.getLogger(__name__)

AHEAD = 8
"""Values that are asked for before the first of them has come: the server holds as many."""
RETRY_S = 1.0
"""Between two attempts to reach a server that could not be reached; everything fails at once meanwhile."""

_Exchange = Callable[[Connection], Iterator[bool]]


class RespClient(BatchClient):
    """What LMCache asks of a native client: batches, and their results once the descriptor is readable.

    Args:
        host: Name or address of the server.
        port: TCP port.
        num_workers: Threads, each with a connection of its own.
        username: For ``AUTH``; may be empty.
        password: For ``AUTH``; may be empty.
    """

    def __init__(self, host: str, port: int, num_workers: int = 8, username: str = "", password: str = "") -> None:
        super().__init__(num_workers, "splint-resp")
        self._address = (host, int(port))
        self._credentials = tuple(word for word in (username, password) if word) if password else ()
        self._local = threading.local()
        self._unreachable_until = 0.0
        self._connections: list[Connection] = []

    def submit_batch_get(self, keys: Sequence[str], targets: Sequence[Any]) -> int:
        """Fill each target with the value of its key; a value of another size is no value."""
        views = [_measured(target) for target in targets]

        def exchange(part: slice) -> _Exchange:
            def run(connection: Connection) -> Iterator[bool]:
                for first in range(part.start, part.stop, AHEAD):
                    some = slice(first, min(first + AHEAD, part.stop))
                    connection.send([b"".join(command("GET", key) for key in keys[some])])
                    yield from (connection.into(view) for view in views[some])

            return run

        return self._exchange(len(keys), exchange)

    def submit_batch_set(self, keys: Sequence[str], values: Sequence[Any]) -> int:
        """Store each value under its key."""
        views = [_measured(value) for value in values]

        def exchange(part: slice) -> _Exchange:
            def run(connection: Connection) -> Iterator[bool]:
                for key, view in zip(keys[part], views[part], strict=True):
                    name = key.encode()
                    head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(view))
                    connection.send(chain([head], outgoing(view), [b"\r\n"]))
                    yield connection.done()

            return run

        return self._exchange(len(keys), exchange, all_or_error=True)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Ask for each key whether it is there."""
        return self._exchange(len(keys), lambda part: _counting("EXISTS", keys[part]))

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Delete each key."""
        return self._exchange(len(keys), lambda part: _counting("DEL", keys[part]))

    def close(self) -> None:
        """End the threads and their connections."""
        super().close()
        for connection in self._connections:
            connection.close()

    def _exchange(self, count: int, exchange: Callable[[slice], _Exchange], *, all_or_error: bool = False) -> int:
        def work(part: slice, results: list[bool]) -> str:
            return self._run(exchange(part), part, results)

        return self._submit(count, work, all_or_error=all_or_error)

    def _run(self, exchange: _Exchange, part: slice, results: list[bool]) -> str:
        """One exchange on this thread's connection, once more where the connection turns out to be an old one."""
        while True:
            fresh = getattr(self._local, "connection", None) is None
            try:
                for place, done in enumerate(exchange(self._connection()), part.start):
                    results[place] = done
            except (OSError, ValueError) as error:
                self._drop()
                results[part] = [False] * (part.stop - part.start)
                if fresh:
                    return str(error) or type(error).__name__
            else:
                return ""

    def _connection(self) -> Connection:
        if getattr(self._local, "connection", None) is None:
            if time.monotonic() < self._unreachable_until:
                raise ConnectionRefusedError("the server could not be reached a moment ago")
            try:
                self._local.connection = Connection(*self._address, self._credentials)
                self._connections.append(self._local.connection)
            except OSError as error:
                self._unreachable_until = time.monotonic() + RETRY_S
                logger.warning("Redis at %s:%d can't be used: %s", *self._address, error)
                raise
        return self._local.connection  # type: ignore[no-any-return]

    def _drop(self) -> None:
        connection, self._local.connection = getattr(self._local, "connection", None), None
        if connection is not None:
            self._connections.remove(connection)
            connection.close()


def _measured(buffer: Any) -> memoryview | Streamed:
    """Something whose length is its bytes."""
    return buffer if isinstance(buffer, Streamed) else memoryview(buffer).cast("B")


def _counting(name: str, keys: Sequence[str]) -> _Exchange:
    def run(connection: Connection) -> Iterator[bool]:
        connection.send([b"".join(command(name, key) for key in keys)])
        return (connection.integer() == 1 for _ in keys)

    return run
