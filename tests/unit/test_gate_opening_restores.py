"""A server that opens although its smoke tests broke off gives the scheduler its thresholds back first."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework import rundir
from patches.serving_gate.gate import Gate
from patches.serving_gate.opening import Opening
from patches.serving_gate.plan import Verdict


def opened(folder: Path, status: str) -> list[tuple[str, ...]]:
    """Open the gate on a verdict; returns the calls to the engines, in order."""
    calls: list[tuple[str, ...]] = []

    async def call(*words: str) -> list[Any]:
        calls.append(words)
        return []

    parallel = SimpleNamespace(_api_process_rank=0, _api_process_count=1)
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel, shutdown_timeout=0),
        engine_core=SimpleNamespace(call_utility_all_async=call),
    )
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    gate = Gate(app, {})  # type: ignore[arg-type]
    asyncio.run(Opening(gate, app, None, folder)._serve(Verdict(status, "full", 1.0, "", ())))
    assert gate.open
    return calls


@pytest.mark.parametrize(("status", "calls"), [("failed", [("splint_probe", "prefill_whole")]), ("passed", [])])
def test_what_a_broken_off_control_left_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, calls: list[tuple[str, ...]]
) -> None:
    monkeypatch.setenv(rundir.ENV, str(tmp_path))
    assert opened(rundir.prepare(tmp_path), status) == calls
