"""A server that is asked to end does so in any phase, with code 0, within 10 s and the drain, and leaves nothing."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.servers import Server

from patches.framework import rundir
from patches.supervision import DRAIN_S

pytestmark = pytest.mark.usefixtures("shared_memory_left_as_found")

Build = Callable[..., Server]
LONGEST_S = 10.0
SERVING_S = LONGEST_S + DRAIN_S
"""Of a server that serves: what it grants its requests comes first, and vLLM's own end takes 5 s on an idle machine."""
VLLM = str(Path(sys.executable).with_name("vllm"))
FORMS = {
    "vllm serve": (VLLM, "serve"),
    "api_server": ("-m", "vllm.entrypoints.openai.api_server"),
    "splint serve": ("-m", "entrypoint.cli", "serve"),
}


@pytest.fixture
def start(build: Build, tmp_path: Path) -> Iterator[Build]:
    """Start a server without waiting for it; its smoke tests are off, its run directory is ``tmp_path / "run"``."""
    servers: list[Server] = []

    def start(*flags: str, smoke: str = "off", **options: object) -> Server:
        environ = {"SPLINT_RUN_DIR": str(tmp_path / "run"), "SPLINT_SMOKE": smoke}
        servers.append(build(*flags, env=environ, **options).start())
        return servers[-1]

    yield start
    for server in servers:
        server.kill_session()


def assert_ends(server: Server, number: signal.Signals, code: int = 0, longest_s: float = LONGEST_S) -> None:
    got, seconds = server.stop(number)
    print(f"{number.name}: code {got} after {seconds:.2f} s")
    assert got == code, server.tail()
    assert seconds < longest_s
    assert server.left() == []


def told_phase(run: Path) -> str | None:
    told = rundir.read_json(run / rundir.PHASE)
    return told["phase"] if told else None


@pytest.mark.parametrize("seconds", [8, *(pytest.param(seconds, marks=pytest.mark.full) for seconds in (3, 15, 20))])
def test_sigterm_while_loading(start: Build, seconds: float) -> None:
    server = start(form=FORMS["vllm serve"])
    time.sleep(seconds)
    assert_ends(server, signal.SIGTERM)


def test_sigterm_while_two_engines_load_under_two_api_servers(start: Build) -> None:
    server = start("--data-parallel-size", "2", form=FORMS["vllm serve"])
    time.sleep(20)
    assert_ends(server, signal.SIGTERM)


def test_sigterm_while_smoke_testing(start: Build, tmp_path: Path) -> None:
    server = start(smoke="full", form=FORMS["api_server"])
    server.wait_for(lambda: told_phase(tmp_path / "run") == "smoke")
    assert_ends(server, signal.SIGTERM)


def test_sigint_while_serving_idle(start: Build) -> None:
    server = start(form=FORMS["api_server"])
    server.wait_ready()
    assert_ends(server, signal.SIGINT, longest_s=SERVING_S)


def ask_400_tokens(server: Server) -> dict[str, object]:
    """A stream of 400 tokens that the server is asked to end in; returns what came of it, and of a later request."""
    asked = {"model": "tiny", "prompt": "one two three", "max_tokens": 400, "ignore_eos": True, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{server.base_url}/v1/completions", json=asked, timeout=60) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(lines)
        server.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
        server.wait_for(lambda: "draining: " in server.text())
        late = [server.get(path) for path in ("/health", "/readyz", "/v1/models")]
        *_, last, done = lines
    return {
        "done": done,
        "tokens": json.loads(last)["usage"]["completion_tokens"],
        "late": [(found.status_code, found.json()["phase"]) if found else None for found in late],
    }


@pytest.mark.parametrize("servers", ["2", pytest.param("1", marks=pytest.mark.full)])
def test_requests_in_flight_end_whole_and_new_ones_are_refused(start: Build, servers: str) -> None:
    """Without any flag. Stock cuts them off, under several API servers whatever --shutdown-timeout says."""
    server = start("--api-server-count", servers, form=FORMS["vllm serve"])
    server.wait_ready()
    found = ask_400_tokens(server)
    print(f"{servers} API servers: {found}")
    assert found == {"done": "[DONE]", "tokens": 400, "late": [(503, "draining")] * 3}
    assert server.wait_end(SERVING_S) == 0
    assert server.left() == []


def test_drain_that_is_too_short_ends_in_time(start: Build) -> None:
    server = start("--shutdown-timeout", "1", form=FORMS["vllm serve"])
    server.wait_ready()
    asked = {"model": "tiny", "prompt": "one two three", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.base_url}/v1/completions", json=asked, timeout=60) as answer:
        next(answer.iter_lines())
        assert_ends(server, signal.SIGTERM, longest_s=LONGEST_S + 1)


def test_sigterm_on_a_headless_node_that_waits_for_its_head(start: Build, tmp_path: Path) -> None:
    server = start(*HEADLESS, form=FORMS["vllm serve"])
    server.wait_for(lambda: any((tmp_path / "run" / rundir.ROSTER).glob("*.json")))
    assert_ends(server, signal.SIGTERM)


HEADLESS = (
    "--headless", "--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-start-rank", "1",
    "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", "9499",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_command_that_serves_nothing_keeps_its_output_and_code(start: Build, tmp_path: Path, form: str) -> None:
    server = start("--no-such-flag", form=FORMS[form])
    assert server.wait_end() == 2
    assert (rundir.read_json(tmp_path / "run" / "supervisor.json") or {})["pid"] == server.pid
    assert "unrecognized arguments: --no-such-flag" in server.text()
    assert "splint" not in server.tail(1)
