"""The verdict is that of this start's own smoke tests: what an earlier server left in the folder opens nothing."""

from __future__ import annotations

import asyncio
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_engine import PLAN

from patches.framework import rundir
from patches.serving_gate.gate import Gate
from patches.serving_gate.opening import Opening
from patches.serving_gate.plan import Verdict


def test_smoke_tests_that_break_off_are_not_covered_up_by_an_earlier_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No supervising parent has cleared the folder where another program starts the server by a call."""
    rundir.write_json(tmp_path / "battery.json", Verdict("passed", "full", 1.0, "", ()).to_json())
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    app = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(vllm_config=None)))
    opening = Opening(Gate(app, {}), app, None, tmp_path)  # type: ignore[arg-type]
    verdict = asyncio.run(opening._run_battery(replace(PLAN, timeout_s=5.0)))
    assert verdict.status == "failed"
    assert verdict.checks[0].reason == "the smoke tests ended with code 1 and left no verdict"
