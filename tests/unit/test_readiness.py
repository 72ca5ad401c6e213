"""After the opening: who is gone is named within a second, and a server that ends finishes what it began."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.gate_stage import Stage, config, staged, until

from patches.framework import roster, rundir
from patches.serving_gate.drain import ATTRIBUTE, Drain
from patches.serving_gate.peers import Peers, peers_of, remote_dp_ranks
from patches.serving_gate.readiness import Members, Readiness, look_after


def entry(pid: int, role: str = "worker", **changes: Any) -> dict[str, Any]:
    found = {"role": role, "dp_rank": 1, "rank": 0, "pid": pid, "start_time": roster.start_time(pid), "alive": True}
    return found | changes


@contextmanager
def child(code: str = "import sys; print('up', flush=True); sys.stdin.read()") -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_a_member_that_is_killed_is_named() -> None:
    with child() as process:
        members = Members([entry(os.getpid(), "engine_core", rank=None), entry(process.pid)])
        assert members.look() is None
        process.kill()
        process.wait()
        assert members.look() == f"gone: worker DP1 rank 0 (pid {process.pid})"


def test_a_pid_in_use_again_is_not_the_member() -> None:
    members = Members([entry(os.getpid(), start_time=1)])
    assert members.look() == f"gone: worker DP1 rank 0 (pid {os.getpid()})"


def test_without_its_lmcache_server_a_server_stays_ready() -> None:
    assert Members([entry(os.getpid(), "lmcache_server", start_time=1)]).look() is None


def test_looking_at_a_hundred_members_takes_milliseconds() -> None:
    members = Members([entry(os.getpid())] * 100)
    spent = min(timeit.repeat(members.look, number=1, repeat=3))
    print(f"100 members looked at in {spent * 1000:.1f} ms")
    assert spent < 0.1


def test_a_reason_is_told_once_and_taken_back() -> None:
    told: list[tuple[str, str | None]] = []
    readiness = Readiness(lambda source, reason: told.append((source, reason)))
    for reason in (None, "gone", "gone", None, None):
        readiness.put("processes", reason)
    assert told == [("processes", "gone"), ("processes", None)]


def test_what_can_not_be_looked_at_is_not_taken_for_well() -> None:
    readiness = Readiness(lambda *_: None)

    def broken() -> str | None:
        raise OSError("no /proc")

    async def scenario() -> None:
        watch = asyncio.create_task(look_after(readiness, {"processes": broken, "engine": lambda: None}))
        await asyncio.sleep(0)
        watch.cancel()

    asyncio.run(scenario())
    assert readiness.reasons == ["processes can't be looked at: OSError: no /proc"]


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ({}, ()),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, (2, 3)),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "local_engines_only": True}, ()),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "enable_elastic_ep": True}, ()),
        ({"data_parallel_size": 4, "data_parallel_size_local": 4}, ()),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_backend": "ray"}, ()),
    ],
)
def test_ranks_of_other_nodes(parallel: dict[str, Any], ranks: tuple[int, ...]) -> None:
    assert remote_dp_ranks(config(**parallel)) == ranks


ENGINE = """
import sys, zmq
dealer = zmq.Context().socket(zmq.DEALER)
dealer.identity = sys.argv[1].encode()
dealer.connect(sys.argv[2])
dealer.send(b"ready")
dealer.recv()
"""


@pytest.fixture
def router() -> Iterator[Any]:
    """The socket from which engines take their requests, as vLLM makes it for ranks on other nodes."""
    zmq: Any = pytest.importorskip("zmq")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind("tcp://127.0.0.1:0")
        yield router


def peers_at(router: Any) -> Peers:
    client = SimpleNamespace(input_socket=router)
    two_nodes = config(data_parallel_size=2, data_parallel_size_local=1)
    peers = peers_of(SimpleNamespace(vllm_config=two_nodes, engine_core=client))
    assert peers is not None
    return peers


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lost_engine_of_another_node_is_named(router: Any, number: int) -> None:
    endpoint = router.last_endpoint.decode()
    engines = [subprocess.Popen([sys.executable, "-c", ENGINE, name, endpoint]) for name in "ab"]
    try:
        assert {router.recv_multipart()[0] for _ in engines} == {b"a", b"b"}
        peers = peers_at(router)
        assert len(peers.lines) == 2
        assert peers.look() is None
        engines[0].send_signal(number)
        engines[0].wait(60)
        assert until(peers.look) == "lost the connection to an engine at 127.0.0.1; ranks on other nodes: DP1"
    finally:
        for engine in engines:
            engine.kill()
            engine.wait(60)
    for _, line in peers.lines:
        line.close()


def test_a_connection_to_another_node_is_kept_alive_by_the_kernel(router: Any) -> None:
    port = int(router.last_endpoint.rpartition(b":")[2])
    with socket.create_connection(("127.0.0.1", port)):
        ((address, line),) = until(lambda: peers_at(router).lines)
        with line:
            assert address == "127.0.0.1"
            assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 5


def test_a_server_whose_engines_are_all_its_own_has_no_peers() -> None:
    assert peers_of(SimpleNamespace(vllm_config=config())) is None


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(Stage(tmp_path)) as stage:
        yield stage


def status(stage: Stage, path: str) -> int:
    return httpx.get(stage.url(path), trust_env=False, timeout=30).status_code


def test_ready_follows_what_is_known_of_the_server(stage: Stage) -> None:
    stage.enter("serving")
    assert status(stage, "/readyz") == 200
    stage.after.readiness.put("processes", "gone: worker DP1 rank 0 (pid 7)")
    answer = httpx.get(stage.url("/readyz"), trust_env=False)
    assert (answer.status_code, answer.json()["reasons"]) == (503, ["gone: worker DP1 rank 0 (pid 7)"])
    assert status(stage, "/livez") == 200
    stage.after.readiness.put("processes", None)
    assert status(stage, "/readyz") == 200


def test_a_dead_engine_is_neither_ready_nor_alive(stage: Stage) -> None:
    stage.enter("serving")
    stage.engine.errored = True
    assert (status(stage, "/readyz"), status(stage, "/livez")) == (503, 503)


def test_a_request_in_flight_ends_whole_and_new_ones_are_refused_while_draining(stage: Stage) -> None:
    stage.enter("serving")
    drain: Drain = getattr(stage.engine, ATTRIBUTE)
    left: list[float | None] = []
    with httpx.stream("GET", stage.url("/slow"), trust_env=False, timeout=60) as answer:
        parts = answer.iter_bytes()
        assert next(parts) == b"begun "
        thread = threading.Thread(target=lambda: left.append(drain.run(120.0)))
        thread.start()
        until(lambda: stage.gate.phase == "draining")
        refused = httpx.get(stage.url("/slow"), trust_env=False, timeout=30)
        assert (refused.status_code, refused.json()["phase"]) == (503, "draining")
        assert refused.headers["retry-after"] == "2"
        assert {path: status(stage, path) for path in ("/health", "/readyz", "/livez", "/metrics")} == {
            "/health": 503, "/readyz": 503, "/livez": 200, "/metrics": 200,
        }  # fmt: skip
        assert left == []
        stage.call(stage.finish.set)
        assert b"".join(parts) == b"whole"
    thread.join(30)
    assert left[0] is not None
    assert 0 < left[0] < 120
    assert (rundir.read_json(stage.run_dir / rundir.PHASE) or {})["phase"] == "draining"


class Clock:
    """The drain's time, which passes only while it sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("patches.serving_gate.drain.time", found)
    return found


@pytest.mark.parametrize("timeout", [0, 20])
def test_the_drain_ends_in_time(stage: Stage, clock: Clock, timeout: float) -> None:
    stage.enter("serving")
    with httpx.stream("GET", stage.url("/slow"), trust_env=False, timeout=60) as answer:
        parts = answer.iter_bytes()  # whose end would close the connection
        next(parts)
        assert getattr(stage.engine, ATTRIBUTE).run(timeout) == 0
        assert clock.now == pytest.approx(timeout, abs=0.1)
        stage.call(stage.finish.set)


def test_nothing_is_waited_for_where_the_engine_has_died(stage: Stage, clock: Clock) -> None:
    stage.enter("serving")
    stage.engine.errored = True
    with httpx.stream("GET", stage.url("/slow"), trust_env=False, timeout=60) as answer:
        parts = answer.iter_bytes()  # whose end would close the connection
        next(parts)
        assert getattr(stage.engine, ATTRIBUTE).run(20) == 20
        assert clock.now == 0
        stage.call(stage.finish.set)


def test_the_loop_that_answers_requests_is_never_blocked(stage: Stage) -> None:
    """Where the engine client is shut down in the loop's own thread, nothing could end while it waits."""
    stage.enter("serving")

    async def in_the_loop() -> float | None:
        left: float | None = getattr(stage.engine, ATTRIBUTE).run(20)
        return left

    assert asyncio.run(in_the_loop()) == 20
    assert stage.gate.phase == "serving"


def test_a_rank_lost_on_another_node_ends_the_server_and_the_supervisor_is_told(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    stage.enter("serving")
    stage.after.readiness.put("other nodes", "lost the connection to an engine at 10.0.0.3; ranks on other nodes: DP1")
    assert stage.server.should_exit
    assert "10.0.0.3" in (rundir.read_json(stage.run_dir / rundir.LOST) or {})["what"]
    assert "not ready: lost the connection" in capfd.readouterr().err


def test_a_gate_that_did_not_open_is_not_watched(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.gate.enter("failed")
    asyncio.run(asyncio.wait_for(stage.after.run(), 30))


def test_a_watch_that_breaks_makes_the_server_unready(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nobody would see that a process is gone, and /readyz would say 200 for ever."""

    def broken(_: Any) -> None:
        raise OSError("no such endpoint")

    monkeypatch.setattr("patches.serving_gate.after.peers_of", broken)
    stage.enter("serving")
    with pytest.raises(OSError, match="no such endpoint"):
        asyncio.run(asyncio.wait_for(stage.after.run(), 30))
    answer = httpx.get(stage.url("/readyz"), trust_env=False)
    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["the watch over this server has ended (OSError: no such endpoint)"]
