"""An engine knows over LMCache's own protocol whether its server is a patched one. Real servers, stock and patched."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.servers import free_port

from patches.framework import process, report, roster
from patches.framework.errors import EnvironmentRefusedError
from patches.framework.records import Role
from patches.lmcache_availability import heartbeat

pytest.importorskip("lmcache")
zmq = pytest.importorskip("zmq")

pytestmark = pytest.mark.filterwarnings("ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning")

CHUNK = 128


class Cache:
    """A ``lmcache server`` as an operator starts it, with a temporary folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def environment(self, **extra: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPLINT_")}
        return {**kept, "TMPDIR": str(self.folder), "XDG_RUNTIME_DIR": str(self.folder), "DO_NOT_TRACK": "1", **extra}

    def start(self, **extra: str) -> Cache:
        words = ["server", "--host", "127.0.0.1", "--port", str(self.port), "--http-port", str(free_port())]
        words += ["--http-host", "127.0.0.1", "--l1-size-gb", "0.1", "--eviction-policy", "LRU"]
        words += ["--chunk-size", str(CHUNK), "--supported-transfer-mode", "auto"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lmcache.cli.main", *words],
                env=self.environment(**extra),
                stdout=log,
                stderr=log,
            )
        return self

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cache]]:
    """Started at once, because their imports are most of their start."""
    found = {name: Cache(tmp_path_factory.mktemp(name)) for name in ("patched", "stock", "reporting")}
    found["patched"].start()
    found["reporting"].start(SPLINT_MODE="report")
    found["stock"].start(SPLINT_MODE="off")
    try:
        for cache in found.values():
            until(cache.listens, 240)
        yield found
    finally:
        for cache in found.values():
            cache.end()


@pytest.fixture(autouse=True)
def engine_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> process.Process:
    """This process, as an engine core with a run directory. The hooks must have patched LMCache's client in it."""
    importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
    current = process.start()
    monkeypatch.setenv("SPLINT_RUN_DIR", str(tmp_path))
    (tmp_path / "roster").mkdir()
    monkeypatch.setattr(current, "facts", {})
    monkeypatch.setattr(current, "identity", {"role": Role.ENGINE_CORE.value, "dp_rank": 0, "rank": None})
    return current


def until(true: Callable[[], Any], limit_s: float = 60.0) -> None:
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < limit_s, f"not so after {limit_s} s"
        time.sleep(0.02)


def scheduler_for(url: str) -> Any:
    from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPSchedulerAdapter, ParallelStrategy

    strategy = ParallelStrategy(mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1)
    return LMCacheMPSchedulerAdapter([url], zmq.Context.instance(), "model", CHUNK, strategy, extra_config={})


def test_a_patched_server_says_who_it_is_and_stands_in_the_engines_report(
    caches: dict[str, Cache], tmp_path: Path
) -> None:
    cache = caches["patched"]
    adapter = scheduler_for(cache.url)
    adapter.shutdown()
    found = report.report(tmp_path)
    [row] = found["lmcache_servers"]
    assert (row["url"], row["answering"], row["fault"]) == (cache.url, True, None)
    assert cache.process is not None
    [server] = roster.remote(roster.load(tmp_path))
    assert (server["pid"], server["role"], server["alive"]) == (cache.process.pid, "lmcache_server", True)
    assert server["patch_set"] == roster.patch_set_digest(("all",))
    states = {each["id"]: each["state"] for each in server["patches"]}
    assert states["lmcache_admission"] == "applied"
    assert server in found["processes"]


def test_a_stock_server_is_refused_in_seconds_and_lives_on(caches: dict[str, Cache]) -> None:
    start = time.monotonic()
    with pytest.raises(EnvironmentRefusedError, match="has no vllm-splint; wanted") as refused:
        scheduler_for(caches["stock"].url)
    assert time.monotonic() - start < 10
    assert "SPLINT_LMCACHE_UNPROTECTED=server" in refused.value.remedy
    assert "No handler" not in (caches["stock"].folder / "log").read_text()


def register(url: str, width: int) -> None:
    """Register a KV cache of one layer, with ``width`` elements for each of its two heads, under the same name."""
    import torch
    from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter, ParallelStrategy

    strategy = ParallelStrategy(mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1)
    extra = {"lmcache.mp.mp_transfer_mode": "engine_driven"}
    worker = LMCacheMPWorkerAdapter(url, zmq.Context.instance(), "model", CHUNK, strategy, extra_config=extra)
    try:
        caches = {"layer.0": torch.zeros(4, 2, CHUNK, width, dtype=torch.bfloat16)}
        worker.register_kv_caches(caches, layout_hints={"kv_layout": "HND"})
    finally:
        worker.shutdown()


def test_an_engine_whose_registration_is_refused_says_why(caches: dict[str, Cache]) -> None:
    register(caches["patched"].url, 32)
    with pytest.raises(EnvironmentRefusedError, match="not to the registration") as refused:
        register(caches["patched"].url, 64)
    assert "an engine that registers {0: 'bfloat16[1, 128, 128]'} under 'model'" in refused.value.found
    assert "wanted {0: 'bfloat16[1, 128, 64]'}" in refused.value.found
    assert "--supported-transfer-mode" not in refused.value.remedy


def test_a_server_in_report_mode_is_refused_because_it_may_keep_bytes_without_seals(caches: dict[str, Cache]) -> None:
    with pytest.raises(EnvironmentRefusedError, match=r"in SPLINT_MODE=report") as refused:
        scheduler_for(caches["reporting"].url)
    assert "SPLINT_MODE=enforce" in refused.value.remedy


def test_a_stock_server_that_the_operator_accepts_is_used_and_shown(
    caches: dict[str, Cache], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPLINT_LMCACHE_UNPROTECTED", "server")
    adapter = scheduler_for(caches["stock"].url)
    adapter.maybe_submit_lookup_request("asked", list(range(CHUNK)))
    until(lambda: adapter.check_lookup_result("asked") is not None)
    adapter.shutdown()
    [row] = report.report(tmp_path)["lmcache_servers"]
    assert (row["server"], row["fault"], row["accepted"]) == (None, "no vllm-splint", True)


def test_a_stock_server_is_used_where_patches_are_only_reported(
    caches: dict[str, Cache], engine_core: process.Process, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(engine_core, "mode", "report")
    scheduler_for(caches["stock"].url).shutdown()
    assert "has no vllm-splint" in capfd.readouterr().err


class Switch:
    """A TCP relay that can be turned to another server: what is connected breaks then, as when a server is replaced."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.entry = socket.create_server(("127.0.0.1", 0))
        self.joined: list[socket.socket] = []
        threading.Thread(target=self.relay, daemon=True).start()

    def relay(self) -> None:
        with suppress(OSError):
            while True:
                near = self.entry.accept()[0]
                far = socket.create_connection(("127.0.0.1", self.port))
                self.joined += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self.pump, args=(source, sink), daemon=True).start()

    def pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    def turn(self, port: int) -> None:
        self.port = port
        self.cut()

    def cut(self) -> None:
        for each in self.joined:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self.entry.shutdown(socket.SHUT_RDWR)
        self.entry.close()
        self.cut()


def test_a_patched_server_that_comes_back_as_a_stock_one_is_not_used(
    caches: dict[str, Cache], caplog: pytest.LogCaptureFixture
) -> None:
    switch = Switch(caches["patched"].port)
    adapter = scheduler_for(f"tcp://127.0.0.1:{switch.entry.getsockname()[1]}")
    try:
        adapter.maybe_submit_lookup_request("starts the heartbeat", list(range(CHUNK)))
        until(lambda: adapter.check_lookup_result("starts the heartbeat") is not None)
        switch.turn(caches["stock"].port)
        until(lambda: "has no vllm-splint now" in caplog.text)
        time.sleep(3 * heartbeat.RETRY_S)
        assert not adapter.is_healthy
        assert caplog.text.count("has no vllm-splint now") == 1
        switch.turn(caches["patched"].port)
        until(lambda: adapter.is_healthy)
    finally:
        adapter.shutdown()
        switch.close()


def test_report_works_beside_a_server_that_shares_no_run_directory(caches: dict[str, Cache]) -> None:
    cache = caches["patched"]
    words = [sys.executable, "-m", "entrypoint.cli", "report", "--json"]
    [folder] = cache.folder.glob("splint-*")
    environ = cache.environment(SPLINT_RUN_DIR=str(folder))  # others' servers on this machine are not asked
    said = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert cache.process is not None
    assert [each["pid"] for each in found["processes"]] == [cache.process.pid]
    assert (found["phase"], found["mode"]) == ("cache server", "enforce")
