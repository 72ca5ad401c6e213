"""An engine core, worker or coordinator that dies ends the server within 10 s, with a code that is not 0."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers import Server

from patches.framework import rundir
from patches.supervision.members import read_object

pytestmark = pytest.mark.usefixtures("shared_memory_left_as_found")

Build = Callable[..., Server]
LONGEST_S = 10.0
VLLM_SERVE = (str(Path(sys.executable).with_name("vllm")), "serve")
API_SERVER = ("-m", "vllm.entrypoints.openai.api_server")


@pytest.fixture
def start(build: Build, tmp_path: Path) -> Iterator[Build]:
    """Start a server without waiting for it; its smoke tests are off, its run directory is ``tmp_path / "run"``."""
    servers: list[Server] = []

    def start(*flags: str, **options: object) -> Server:
        environ = {"SPLINT_RUN_DIR": str(tmp_path / "run"), "SPLINT_SMOKE": "off"}
        servers.append(build(*flags, env=environ, **options).start())
        return servers[-1]

    yield start
    for server in servers:
        server.kill_session()


def attested(run: Path, role: str) -> dict[str, Any] | None:
    entries = (read_object(path) for path in (run / rundir.ROSTER).glob("*.json"))
    return next((entry for entry in entries if entry.get("role") == role), None)


def assert_death_ends(server: Server, run: Path, role: str) -> None:
    server.wait_for(lambda: attested(run, role))
    pid = (attested(run, role) or {})["pid"]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    code, seconds = server.wait_end(), time.monotonic() - began
    print(f"{role} killed: code {code} after {seconds:.2f} s")
    assert code != 0
    assert seconds < LONGEST_S
    assert f"(pid {pid}) ended unasked" in server.text()
    assert server.left() == []


@pytest.mark.parametrize("role", [pytest.param("worker", marks=pytest.mark.full), "engine_core"])
def test_death_while_starting(start: Build, tmp_path: Path, role: str) -> None:
    assert_death_ends(start(form=VLLM_SERVE), tmp_path / "run", role)


@pytest.mark.full
def test_death_of_the_coordinator_while_starting(start: Build, tmp_path: Path) -> None:
    assert_death_ends(start("--data-parallel-size", "2", form=VLLM_SERVE), tmp_path / "run", "dp_coordinator")


@pytest.mark.parametrize(("role", "form"), [("worker", API_SERVER), ("engine_core", VLLM_SERVE)])
def test_death_while_serving(start: Build, tmp_path: Path, role: str, form: tuple[str, ...]) -> None:
    server = start(form=form)
    server.wait_ready()
    assert_death_ends(server, tmp_path / "run", role)


def test_death_of_the_coordinator_while_two_api_servers_serve(start: Build, tmp_path: Path) -> None:
    server = start("--data-parallel-size", "2", "--enable-expert-parallel", form=VLLM_SERVE)
    server.wait_ready()
    assert_death_ends(server, tmp_path / "run", "dp_coordinator")


def test_death_of_an_engine_on_a_headless_node(start: Build, tmp_path: Path) -> None:
    flags = (
        "--headless", "--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-start-rank", "1",
        "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", "9498",
    )  # fmt: skip
    assert_death_ends(start(*flags, form=VLLM_SERVE), tmp_path / "run", "engine_core")
