"""Real servers for the end-to-end tests: started, watched and ended as an operator would."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

__all__ = [
    "ENGINE_FLAGS",
    "LMCacheServer",
    "Server",
    "connector_config",
    "engine_environment",
    "free_port",
    "lmcache_server",
    "running",
]

ENGINE_FLAGS = (
    "--served-model-name", "tiny", "--max-model-len", "2048", "--dtype", "bfloat16", "--enforce-eager",
    "--max-num-seqs", "8", "--host", "127.0.0.1",
)  # fmt: skip
READY_S = 240.0


def free_port() -> int:
    """A TCP port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def engine_environment(**extra: str) -> dict[str, str]:
    """The environment in which vLLM's CPU build runs without a network.

    One OpenMP thread a worker: two ranks with two threads each on two cores wait for one another, seven times slower.
    The preflight's all-reduce, which imports torch, is left to the main job's server. As in `make serve` and the image
    nothing is compiled: --enforce-eager leaves some, which takes seconds on each rank.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPLINT_", "VLLM_", "LMCACHE_"))}
    return {
        **kept,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "SPLINT_PREFLIGHT": "-allreduce",
        **extra,
    }


@dataclass
class Server:
    """A serving command and its process. ``command`` is everything after the interpreter."""

    command: Sequence[str]
    port: int
    log: Path
    environ: Mapping[str, str] = field(default_factory=engine_environment)
    process: subprocess.Popen[bytes] | None = None
    ready_s: float = 0.0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        if self.process is None:
            raise RuntimeError("the server was not started")
        return self.process.pid

    def start(self) -> Server:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.command],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=dict(self.environ),
                start_new_session=True, cwd=self.log.parent,
            )  # fmt: skip
        return self

    def get(self, path: str, **options: Any) -> httpx.Response | None:
        """The answer, or None while nobody listens."""
        try:
            # Without TLS, and so without 26 ms of reading certificates for each question of a waiting test.
            return httpx.get(self.base_url + path, timeout=30, verify=False, **options)
        except httpx.TransportError:
            return None

    def count(self, metric: str) -> float:
        """A metric's sum over its labels."""
        answer = self.get("/metrics")
        if answer is None:
            raise RuntimeError(f"no answer from {self.base_url}")
        return sum(map(float, re.findall(rf"^{re.escape(metric)}(?:\{{.*\}})? (\S+)$", answer.text, re.MULTILINE)))

    def wait_ready(self, path: str = "/health", timeout_s: float = READY_S) -> float:
        """Wait for 200 on ``path``; returns the seconds it took.

        Raises:
            RuntimeError: the server ended or is not ready in time; its log's end is in the message.
        """
        self.ready_s = self.wait_for(
            lambda: (answer := self.get(path)) is not None and answer.status_code == 200, timeout_s
        )
        return self.ready_s

    def wait_for(self, true: Any, timeout_s: float = READY_S) -> float:
        """Wait until ``true()``; returns the seconds it took. Raises like :meth:`wait_ready`."""
        start = time.monotonic()
        while not true():
            if self.process is not None and self.process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self.process.returncode}\n{self.tail()}")
            if time.monotonic() - start > timeout_s:
                raise RuntimeError(f"not so far after {timeout_s:g} s\n{self.tail()}")
            time.sleep(0.1)
        return time.monotonic() - start

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 60.0) -> tuple[int, float]:
        """Send a signal, wait for the end; returns the exit code and the seconds it took."""
        start = time.monotonic()
        os.kill(self.pid, number)
        return self.wait_end(timeout_s), time.monotonic() - start

    def wait_end(self, timeout_s: float = 60.0) -> int:
        if self.process is None:
            raise RuntimeError("the server was not started")
        return self.process.wait(timeout_s)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def kill_session(self) -> None:
        """The last resort of a test's clean-up: end every process of this server's session."""
        if self.process is not None:
            subprocess.run(["pkill", "-KILL", "-s", str(self.process.pid)], check=False)
            self.process.wait(60)

    def members(self) -> list[int]:
        """Pids of the processes of this server's session that still run."""
        listed = subprocess.run(["pgrep", "-s", str(self.pid)], capture_output=True, text=True, check=False)
        return [int(line) for line in listed.stdout.split()]

    def left(self) -> list[int]:
        """Those of them that outlive the server. One that was killed needs a processor to give its memory back on."""
        deadline = time.monotonic() + 10
        while (pids := self.members()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return pids


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Start ``server``; on leaving, stop it and leave no process behind."""
    server.start()
    try:
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                server.stop(timeout_s=30)
        server.kill_session()


@dataclass
class LMCacheServer:
    """A real ``lmcache server`` on loopback."""

    port: int
    http_port: int
    log: Path
    flags: Sequence[str] = ("--chunk-size", "128", "--supported-transfer-mode", "auto")
    environ: Mapping[str, str] = field(default_factory=engine_environment)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> LMCacheServer:
        command = [
            sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(self.port),
            "--http-host", "127.0.0.1", "--http-port", str(self.http_port), "--l1-size-gb", "1",
            "--prometheus-port", str(free_port()), "--eviction-policy", "LRU", *self.flags,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=dict(self.environ), start_new_session=True
            )
        return self

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until it accepts connections."""
        deadline = time.monotonic() + timeout_s
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if time.monotonic() > deadline or (self.process is not None and self.process.poll() is not None):
                raise RuntimeError(f"lmcache server does not answer\n{self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None:
            os.kill(self.process.pid, number)
            if number in (signal.SIGKILL, signal.SIGTERM):
                self.process.wait(30)


@contextmanager
def lmcache_server(log: Path, **options: Any) -> Iterator[LMCacheServer]:
    """A running LMCache server that answers."""
    server = LMCacheServer(free_port(), free_port(), log, **options).start()
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()


def connector_config(port: int, extra: Mapping[str, Any] | None = None) -> str:
    """vLLM's ``--kv-transfer-config`` for the LMCache server on ``port``, with more of the connector's own settings."""
    settings = {"lmcache.mp.host": "127.0.0.1", "lmcache.mp.port": port, **(extra or {})}
    whole = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}
    return json.dumps(whole)
