"""A real redis-server on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from patches.lmcache_admission import resp_wire
from support.servers import free_port

__all__ = ["LIVE_SILENT_S", "Redis", "redis_server"]

LIVE_SILENT_S = 3.0
"""Instead of a second: a live Redis that gets no processor for a second or two is to be waited for."""


class Redis:
    """Started, killed and started again on one port, with nothing kept on disk unless it is asked to."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = free_port()
        self._folder, self._flags = folder, flags
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers; skips the test where there is none to start, but not in CI.

        Raises:
            RuntimeError: there is none in CI, whose run script installs it.
            TimeoutError: it does not answer.
        """
        if shutil.which("redis-server") is None:
            missing = "no redis-server here: install Debian's package of this name, as .ci/run does"
            if os.environ.get("CI"):
                raise RuntimeError(missing)
            pytest.skip(missing)
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir",
                 str(self._folder), *self._flags],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    probe.sendall(b"PING\r\n")
                    if probe.recv(16).startswith(b"+PONG"):
                        return
            time.sleep(0.05)
        raise TimeoutError(f"redis-server on port {self.port} does not answer")

    def signal(self, number: int) -> None:
        """Send it a signal, such as the one that stops it for a while."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None


@contextmanager
def redis_server(folder: Path, *flags: str) -> Iterator[Redis]:
    """A running one. Clients in this process give it :data:`LIVE_SILENT_S` for an answer."""
    server = Redis(folder, *flags)
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patcher:
            patcher.setattr(resp_wire, "SILENT_S", LIVE_SILENT_S)
            yield server
    finally:
        server.kill()
