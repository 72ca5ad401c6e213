"""The health of a stock server (``SPLINT_MODE=off``), which keeps no run directory: its own ``/health`` is asked.

Where it listens is read off its command line: port, ``--uds``, TLS, a ``--config`` file. Standard library only, but for
such a file.
"""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path

from patches.framework.arguments import Arguments
from patches.supervision import processes
from patches.supervision.command import is_serving, program

__all__ = ["answer", "newest_server"]

TIMEOUT_S = 3.0
_REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_EVERYWHERE = {None: "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to connect, not to listen
_DEFAULT_PORT = "8000"


def newest_server() -> list[str] | None:
    """The command line of this user's vLLM server that was started last, or None."""
    commands = {pid: words for pid in _own() if (words := _words(pid))}
    found = [(state.started, words) for pid, words in commands.items() if (state := processes.read_state(pid))]
    return max(found)[1] if found else None


def _own() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _is_own(path)]


def _is_own(process: Path) -> bool:
    try:
        return process.stat().st_uid == os.geteuid()
    except OSError:  # it ends while we look
        return False


def _words(pid: int) -> list[str]:
    """The command line of ``pid`` where that is a vLLM server, else nothing."""
    try:
        words = [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    except OSError:
        return []
    return words if words and is_serving(words) else []


def answer(words: list[str]) -> tuple[bool, str]:
    """Whether the server started as ``words`` answers ``/health`` with 200, and what it said.

    A headless node listens nowhere: that its process runs is all that stock shows of it.
    """
    _, given = program(words)
    arguments = Arguments(given[1:] if given[:1] == ["serve"] else given)
    if arguments.has("--headless"):
        return True, "headless, its process runs"
    try:
        with _connection(arguments) as connection:
            connection.sendall(_REQUEST)
            status = connection.makefile("rb").readline().split()[1:2]
    except OSError as error:
        return False, f"/health does not answer ({error})"
    return status == [b"200"], f"/health says {b''.join(status).decode(errors='replace') or 'nothing'}"


def _connection(arguments: Arguments) -> socket.socket:
    path = arguments.value("--uds")
    if path:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(TIMEOUT_S)
        connection.connect(path)
        return connection
    host = arguments.value("--host")
    place = (_EVERYWHERE.get(host, host or ""), int(arguments.value("--port") or _DEFAULT_PORT))
    connection = socket.create_connection(place, TIMEOUT_S)
    return _encrypted(connection) if arguments.value("--ssl-certfile") else connection


def _encrypted(connection: socket.socket) -> socket.socket:
    """Without a check of the certificate: it is our own, made out to another name than this machine's."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(connection)
