"""One line a change of state, for people or for machines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from patches.framework import log, rundir
from patches.serving_gate import phases


def test_text_is_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(log.SETTING, raising=False)
    assert log.line("phase", "open for traffic", phase="serving") == "splint: open for traffic"


def test_json_is_one_line_with_the_facts(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(log.SETTING, "json")
    log.tell("refused", "refused to serve\n  found: x", found="x")
    (line,) = capfd.readouterr().err.splitlines()
    told = json.loads(line)
    assert told.pop("time").endswith("Z")
    message = "refused to serve\n  found: x"
    assert told == {"logger": "splint", "event": "refused", "message": message, "pid": os.getpid(), "found": "x"}


def test_a_phase_is_told_once_with_its_history(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for phase in ("smoke", "smoke", "serving"):
        phases.note(tmp_path, phase, 20, f"now {phase}")
    assert capfd.readouterr().err.splitlines() == ["splint: now smoke", "splint: now serving"]
    told = rundir.read_json(tmp_path / rundir.PHASE) or {}
    assert (told["phase"], told["drain_s"]) == ("serving", 20)
    assert [step["phase"] for step in told["history"]] == ["smoke", "serving"]
    assert told["history"][1]["since"] == told["since"]
