"""A node that is lost while the server serves: unready at once, and the survivor ends as for a rank of its own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers import Server, free_port

from patches.framework import rundir
from patches.supervision.members import read_object

pytestmark = pytest.mark.full

Build = Callable[..., Server]
NOTICED_S = 10.0


@pytest.fixture
def two_nodes(build: Build, tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """Head with DP0 and headless node with DP1, on one machine: their own run directories, TCP between them."""
    together = (
        "--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1",
        "--data-parallel-rpc-port", str(free_port()), "--enable-expert-parallel",
    )  # fmt: skip

    def node(name: str, *flags: str) -> Server:
        environ = {"SPLINT_RUN_DIR": str(tmp_path / name), "SPLINT_SMOKE": "quick"}
        return build(*together, *flags, env=environ).start()

    servers = [node("head", "--api-server-count", "1")]
    try:
        servers.append(node("node", "--headless", "--data-parallel-start-rank", "1"))
        yield servers[0], servers[1]
    finally:
        for server in servers:
            server.kill_session()


def readiness(server: Server) -> tuple[int, list[str]]:
    answer = server.get("/readyz")
    return (0, []) if answer is None else (answer.status_code, answer.json().get("reasons", []))


def test_a_node_killed_while_serving(two_nodes: tuple[Server, Server], tmp_path: Path) -> None:
    head, node = two_nodes
    head.wait_ready()
    assert readiness(head) == (200, [])
    began = time.monotonic()
    node.kill_session()
    said: list[tuple[int, list[str]]] = []

    def unready() -> bool:
        said.append(readiness(head))
        return said[-1][0] != 200

    head.wait_for(unready, NOTICED_S)
    noticed = time.monotonic() - began
    code = head.wait_end(20)
    ended = time.monotonic() - began
    print(f"/readyz said {said[-1]} after {noticed:.1f} s; the head ended with {code} after {ended:.1f} s")
    assert noticed < NOTICED_S
    assert "lost the connection to an engine" in head.text()
    assert code != 0
    assert ended < NOTICED_S
    assert head.members() == []
    assert json.loads((tmp_path / "head" / rundir.LOST).read_text())["what"].endswith("ranks on other nodes: DP1")


def test_a_rank_of_another_node_that_is_killed_alone(two_nodes: tuple[Server, Server], tmp_path: Path) -> None:
    """Both nodes end: the node by its own supervisor, the head because its group is not whole any more."""
    head, node = two_nodes
    head.wait_ready()
    entries: list[dict[str, Any]] = [read_object(path) for path in (tmp_path / "node" / rundir.ROSTER).glob("*.json")]
    engine = next(entry["pid"] for entry in entries if entry.get("role") == "engine_core")
    began = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    codes = node.wait_end(20), head.wait_end(20)
    print(f"node and head ended with {codes} after {time.monotonic() - began:.1f} s")
    assert 0 not in codes
    assert time.monotonic() - began < NOTICED_S
