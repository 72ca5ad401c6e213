"""deploy/k8s/wide-ep on one machine: leader and worker with the manifest's arguments, but for a GPU's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.manifests import of_kind, templates, words
from support.servers import ENGINE_FLAGS, Server, engine_environment, free_port

from patches.framework import rundir
from patches.supervision import living
from patches.supervision.members import read_object

pytestmark = pytest.mark.full

Group = dict[str, Server]


def health(run: Path) -> tuple[int, str]:
    said = subprocess.run(
        [sys.executable, "-m", "entrypoint.start", "health"], env={**os.environ, rundir.ENV: str(run)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return said.returncode, said.stdout.strip()


def _on_the_cpu(given: list[str], rpc_port: int) -> list[str]:
    """One rank a node, no LMCache, the CPU's FP8 format; the rest is the manifest's."""
    others = {"--data-parallel-size=16": "--data-parallel-size=2", "--kv-cache-dtype=fp8": "--kv-cache-dtype=fp8_e5m2"}
    kept = [
        others.get(word, word) for word in given if not word.startswith(("--kv-transfer-config", "--host", "--port"))
    ]
    assert set(others.values()) <= set(kept)
    return [*kept, *ENGINE_FLAGS[:-2], "--data-parallel-rpc-port", str(rpc_port)]


@pytest.fixture
def group(model: str, tmp_path: Path) -> Iterator[Group]:
    """The two nodes, started; their run directories are ``tmp_path / name``."""
    (document,) = of_kind("wide-ep", "LeaderWorkerSet")
    port, rpc_port = free_port(), free_port()
    servers: Group = {}
    for index, (name, template) in enumerate(templates(document)):
        given = words(template, MODEL=model, LWS_WORKER_INDEX=str(index), LWS_LEADER_ADDRESS="127.0.0.1")
        listening = ("--host", "127.0.0.1", "--port", str(port)) if name == "leader" else ()
        command = ("-m", "entrypoint.start", "serve", *_on_the_cpu(given, rpc_port), *listening)
        environ = engine_environment(SPLINT_RUN_DIR=str(tmp_path / name))
        servers[name] = Server(command, port, tmp_path / f"{name}.log", environ).start()
    yield servers
    for server in servers.values():
        server.kill_session()


def test_a_group_serves_is_healthy_on_both_nodes_and_ends_with_a_lost_engine(group: Group, tmp_path: Path) -> None:
    leader, worker = group["leader"], group["worker"]
    worker.wait_for(lambda: living.attested(tmp_path / "worker"))
    assert health(tmp_path / "worker")[0] == health(tmp_path / "leader")[0] == 1
    leader.wait_ready()
    said = {name: health(tmp_path / name) for name in group}
    print(said)
    assert [code for code, _ in said.values()] == [0, 0]
    assert said["leader"][1].startswith("healthy: serving, ")
    assert said["worker"][1].startswith("healthy: engines up, ")
    body = {"model": "tiny", "prompt": "the quick brown", "max_tokens": 4}
    for rank in (0, 1):
        asked = httpx.post(
            leader.base_url + "/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}, timeout=60
        )
        assert asked.status_code == 200
    assert_lost_engine_ends_all(group, tmp_path)


def assert_lost_engine_ends_all(group: Group, tmp_path: Path) -> None:
    entries = (read_object(path) for path in (tmp_path / "worker" / rundir.ROSTER).glob("*.json"))
    engine = next(entry for entry in entries if entry["role"] == "engine_core")
    began = time.monotonic()
    os.kill(engine["pid"], signal.SIGKILL)
    unready = group["leader"].wait_for(
        lambda: (answer := group["leader"].get("/readyz")) is None or answer.status_code == 503
    )
    codes = {name: (server.wait_end(), round(time.monotonic() - began, 1)) for name, server in group.items()}
    print(f"engine of the worker killed: /readyz unready after {unready:.1f} s; code and seconds: {codes}")
    assert unready < 10
    assert all(code != 0 and seconds < 20 for code, seconds in codes.values())
    assert health(tmp_path / "worker")[0] == 1
