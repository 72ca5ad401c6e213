"""The gate itself: shut it answers 503 and lets the secret pass; while all open together it holds; open it is gone."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from patches.framework import rundir
from patches.serving_gate.gate import Gate
from patches.serving_gate.plan import CONTROL_PREFIX, SMOKE_HEADER


async def application(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b'{"from": "vllm"}'})


async def reset() -> dict[str, Any]:
    return {"reset": True}


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    monkeypatch.setenv(rundir.ENV, str(tmp_path))
    rundir.write_json(tmp_path / rundir.SMOKE_PLAN, {"secret": "open sesame"})
    return Gate(application, {"/reset_prefix_cache": reset})


async def ask(gate: Gate, path: str = "/health", secret: str | None = None, kind: str = "http") -> tuple[Any, Any]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if secret is None else [(SMOKE_HEADER.encode(), secret.encode())]
    await gate({"type": kind, "path": path, "headers": headers}, None, send)  # type: ignore[arg-type]
    if kind == "websocket":
        return sent[0]["code"], None
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/readyz", "/startupz", "/nowhere"])
def test_shut_it_answers_503_with_the_phase(gate: Gate, path: str) -> None:
    status, body = asyncio.run(ask(gate, path))
    assert (status, body["phase"], body["error"]["code"]) == (503, "smoke", 503)


def test_shut_it_is_alive_and_closes_websockets(gate: Gate) -> None:
    assert asyncio.run(ask(gate, "/livez"))[0] == 200
    assert asyncio.run(ask(gate, "/v1/realtime", kind="websocket"))[0] == 1013
    gate.enter("failed")
    assert asyncio.run(ask(gate, "/livez"))[0] == 503


@pytest.mark.parametrize(("secret", "status"), [("open sesame", 200), ("guess", 503), ("", 503)])
def test_only_the_secret_passes(gate: Gate, secret: str, status: int) -> None:
    assert asyncio.run(ask(gate, secret=secret))[0] == status


def test_the_secret_dies_with_the_plan(gate: Gate, tmp_path: Path) -> None:
    (tmp_path / rundir.SMOKE_PLAN).unlink()
    assert asyncio.run(ask(gate, secret="open sesame"))[0] == 503


@pytest.mark.parametrize("phase", ["failed", "draining"])
def test_the_secret_opens_no_gate_that_closed_again(gate: Gate, phase: str) -> None:
    gate.enter("serving")
    gate.enter(phase)
    assert asyncio.run(ask(gate, "/v1/models", secret="open sesame"))[0] == 503


def test_control_calls_exist_behind_the_secret_and_end_with_the_opening(gate: Gate) -> None:
    path = f"{CONTROL_PREFIX}/reset_prefix_cache"
    assert asyncio.run(ask(gate, path))[0] == 503
    assert asyncio.run(ask(gate, path, secret="open sesame"))[1] == {"reset": True}
    gate.enter("serving")
    assert asyncio.run(ask(gate, path, secret="open sesame"))[1] == {"from": "vllm"}


def test_while_all_open_together_requests_wait_instead_of_being_refused(gate: Gate) -> None:
    async def scenario() -> tuple[bool, Any]:
        gate.enter("opening")
        asked = asyncio.create_task(ask(gate))
        await asyncio.sleep(0)
        waiting = not asked.done()
        gate.enter("serving")
        return waiting, (await asked)[0]

    assert asyncio.run(scenario()) == (True, 200)


def test_an_open_gate_adds_less_than_a_microsecond_to_a_request() -> None:
    specification = importlib.util.spec_from_file_location("gate_bench", Path(__file__).parents[2] / "bench/gate.py")
    assert specification is not None
    assert specification.loader is not None
    bench = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(bench)
    added = bench.asgi_path_ns(calls=2_000, rounds=20)
    print(f"an open gate adds {added:.0f} ns to a request")
    assert added < 1000
