"""The LMCache server killed, stopped and started again while eight clients stream from a real engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.servers import LMCacheServer, Server, connector_config, free_port, lmcache_server
from support.streams import Load, external_hits, until

AWAY_S = 8.0
# Beyond what the same clients wait for while no prompt is known and another LMCache server starts beside the engine:
# without its cache an engine computes every prompt, and the start of a server takes a core of two for many seconds.
# Stock hangs for 60 s and more.
MOST_EXTRA_S = 6.0
SERVER_COPIES = {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}


@contextmanager
def killed(cache: LMCacheServer) -> Iterator[None]:
    cache.kill(signal.SIGKILL)
    yield
    cache.start()
    cache.wait_ready()


@contextmanager
def stopped(cache: LMCacheServer) -> Iterator[None]:
    assert cache.process is not None
    os.kill(cache.process.pid, signal.SIGSTOP)
    yield
    os.kill(cache.process.pid, signal.SIGCONT)


@contextmanager
def restarted(cache: LMCacheServer) -> Iterator[None]:
    """Another server stands in the killed one's place at once, empty."""
    cache.kill(signal.SIGKILL)
    cache.start()
    yield
    cache.wait_ready()


full = pytest.mark.full


@pytest.mark.parametrize(
    ("away", "extra"),
    [
        pytest.param(killed, {}, id="killed"),
        pytest.param(stopped, {}, id="stopped", marks=full),
        pytest.param(restarted, {}, id="restarted", marks=full),
        pytest.param(killed, SERVER_COPIES, id="killed, the server copies", marks=full),
        pytest.param(stopped, SERVER_COPIES, id="stopped, the server copies", marks=full),
        pytest.param(restarted, SERVER_COPIES, id="restarted, the server copies", marks=full),
    ],
)
def test_requests_go_on_without_the_lmcache_server_and_caching_resumes(
    serve: Callable[..., Server], tmp_path: Path, away: Callable[[LMCacheServer], object], extra: dict[str, str]
) -> None:
    with lmcache_server(tmp_path / "lmcache.log") as cache:
        # Without vLLM's own prefix cache every known prompt is looked up in LMCache and loaded from it.
        server = serve("--no-enable-prefix-caching", "--kv-transfer-config", connector_config(cache.port, extra))
        load = Load(server)
        with load.running():
            time.sleep(6.0)
            undisturbed = load.longest_wait_s(0.0)
            uncached = time.monotonic()
            with load.only_new(), lmcache_server(tmp_path / "control.log"):
                time.sleep(4.0)
            cold = load.longest_wait_s(uncached)
            time.sleep(3.0)
            began = time.monotonic()
            assert external_hits(server) > 0
            with away(cache):  # type: ignore[attr-defined]
                time.sleep(AWAY_S)
                at_return = external_hits(server)
                absent = load.longest_wait_s(began)
            resumed = until(lambda: external_hits(server) > at_return + 1000, 120.0)
            time.sleep(3.0)
        disturbed = load.longest_wait_s(began)
        print(
            f"longest wait {undisturbed:.2f} s, without hits {cold:.2f} s, in the outage {absent:.2f} s,"
            f" with the return {disturbed:.2f} s;"
            f" hits again after {resumed:.1f} s"
        )
        assert load.failures() == []
        assert load.wrong() == 0
        assert disturbed < max(undisturbed, cold) + MOST_EXTRA_S
        assert server.text().count("answers again; caching resumes") <= 2  # the scheduler's link and the worker's


@pytest.mark.full
@pytest.mark.parametrize("extra", [{}, SERVER_COPIES], ids=["the worker copies", "the server copies"])
def test_a_server_that_stands_still_while_requests_are_preempted(
    serve: Callable[..., Server], tmp_path: Path, extra: dict[str, str]
) -> None:
    """The cache holds three prompts of eight blocks, but not the ninth block that each answer needs."""
    with lmcache_server(tmp_path / "lmcache.log") as cache:
        server = serve(
            "--no-enable-prefix-caching", "--num-gpu-blocks-override", "26",
            "--kv-transfer-config", connector_config(cache.port, extra),
        )  # fmt: skip
        load = Load(server, prompt_tokens=8 * 128 - 8)
        with load.running():
            time.sleep(5.0)
            for _ in range(3):
                with stopped(cache):
                    time.sleep(3.0)
                time.sleep(3.0)
        preempted = server.count("vllm:num_preemptions_total")
        print(f"{preempted:g} preemptions, {len(load.streams)} streams, longest wait {load.longest_wait_s(0.0):.2f} s")
        assert load.failures() == []
        assert load.wrong() == 0
        assert preempted > 0


@pytest.mark.parametrize(
    ("flags", "found", "remedy"),
    [
        (("--chunk-size", "128"), "not to the registration", "--supported-transfer-mode auto"),
        pytest.param(
            ("--chunk-size", "96", "--supported-transfer-mode", "auto"),
            "has chunk size 96",
            "--chunk-size 256",
            marks=full,
        ),
    ],
)
def test_wrongly_started_server_is_refused_with_the_command_that_starts_it_right(
    build: Callable[..., Server], tmp_path: Path, flags: tuple[str, ...], found: str, remedy: str
) -> None:
    with lmcache_server(tmp_path / "lmcache.log", flags=flags) as cache:
        refused(build("--kv-transfer-config", connector_config(cache.port)), found, remedy)


def test_absent_server_is_refused_within_the_start_limit(build: Callable[..., Server]) -> None:
    port = free_port()
    server = build("--kv-transfer-config", connector_config(port), env={"SPLINT_LMCACHE_START_TIMEOUT_S": "3"})
    refused(server, "no LMCache server answered", f"lmcache server --host 127.0.0.1 --port {port}")


def refused(server: Server, found: str, remedy: str) -> None:
    server.start()
    try:
        code = server.wait_end(150)
    finally:
        server.kill_session()
    assert (code, found in server.text(), remedy in server.text()) == (78, True, True), server.tail()
