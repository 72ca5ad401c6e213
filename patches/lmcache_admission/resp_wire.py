"""One connection that speaks RESP, as far as a cache needs it: in step with the server, or closed."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

__all__ = ["Connection", "OutOfStepError", "command"]

CONNECT_S = 1.0
SILENT_S = 1.0
"""Without any byte: what Redis holds in memory comes in milliseconds, and an engine's look-up waits for it."""
_BUFFER_BYTES = 1 << 16
_LONGEST_LINE = 1 << 12


class OutOfStepError(ConnectionError):
    """The server's answer is not what its protocol allows; the connection is of no use any more."""


class Connection:
    """A connection to one server.

    Args:
        host: Name or address.
        port: TCP port.
        credentials: Nothing, a password, or a user's name and a password.

    Raises:
        OSError: the server can't be reached or does not let us in.
    """

    def __init__(self, host: str, port: int, credentials: Sequence[str] = ()) -> None:
        self._socket = socket.create_connection((host, port), timeout=CONNECT_S)
        self._socket.settimeout(SILENT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        try:
            if credentials:
                self.send([command("AUTH", *credentials)])
                if not self.done():
                    raise PermissionError(f"{host}:{port} refuses AUTH")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """End it."""
        self._socket.close()

    def send(self, parts: Iterable[bytes | memoryview]) -> None:
        """Send commands, or a command's parts, in order."""
        for part in parts:
            left = memoryview(part)
            while left:  # sendall() would hold all of a value to the time that may pass without any byte
                left = left[self._socket.send(left) :]

    def integer(self) -> int | None:
        """The next answer as a whole number; None where the server answers with an error."""
        line = self._line()
        return int(line[1:]) if _is(line, b":") else None

    def done(self) -> bool:
        """Whether the next answer is ``OK``, not an error."""
        return _is(self._line(), b"+")

    def into(self, target: memoryview) -> bool:
        """Read the next answer's bytes into ``target``, where they are exactly as many; else read them away."""
        line = self._line()
        size = int(line[1:]) if _is(line, b"$") else -1
        if size < 0:
            return False
        fits = size == len(target)
        if fits:
            self._read(target)
        else:
            self._skip(size)
        if self._line():
            raise OutOfStepError("an answer goes on behind its end")
        return fits

    def _line(self) -> bytes:
        while (found := bytes(self._buffer[self._start : self._end]).find(b"\r\n")) < 0:
            if self._end - self._start > _LONGEST_LINE:
                raise OutOfStepError("a line without end")
            self._fill()
        line = bytes(self._buffer[self._start : self._start + found])
        self._start += found + 2
        return line

    def _fill(self) -> None:
        rest = bytes(self._buffer[self._start : self._end])
        self._buffer[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
        self._end += self._received(self._buffer[self._end :])

    def _received(self, target: memoryview) -> int:
        count = self._socket.recv_into(target)
        if not count:
            raise OutOfStepError("the server closed the connection")
        return count

    def _read(self, target: memoryview) -> None:
        count = min(len(target), self._end - self._start)
        target[:count] = self._buffer[self._start : self._start + count]
        self._start += count
        while count < len(target):
            count += self._received(target[count:])

    def _skip(self, size: int) -> None:
        while size > self._end - self._start:
            size -= self._end - self._start
            self._start = self._end = 0
            self._fill()
        self._start += size


def command(*words: str | bytes) -> bytes:
    """A command in RESP."""
    encoded = [word.encode() if isinstance(word, str) else word for word in words]
    parts = [b"*%d\r\n" % len(encoded), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)]
    return b"".join(parts)


def _is(line: bytes, kind: bytes) -> bool:
    """Whether an answer is of that kind; False for an error. Raises OutOfStepError: it is neither."""
    if line[:1] not in (kind, b"-"):
        raise OutOfStepError(f"an answer of kind {line[:1]!r}, wanted {kind!r}")
    return line[:1] == kind
