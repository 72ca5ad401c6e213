"""What the engines answer to control calls, judged; and that nobody else may make such calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import PLAN

from entrypoint.smoke import probing
from entrypoint.smoke.check import CheckFailedError, Context, DoesNotApplyError
from entrypoint.smoke.checks import kv_round_trip
from patches.framework import rundir
from patches.framework.errors import GateOpenError
from patches.kv_probe.wrappers import check_closed

LAYER = "model.layers.1.self_attn.attn"


def worker(**changes: Any) -> dict[str, Any]:
    return {
        "rank": 0, "layers": 2, "bytes_written": 65536, "bytes_per_token": 512.0, "bytes_per_token_wanted": 512.0,
        "said_by": "KVCacheProfile", "differing": {}, **changes,
    }  # fmt: skip


def engine(dp_rank: int = 0, through: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    moved = {"name": "LMCacheMPConnector", "tokens": 256, "workers": [{"rank": 0, "differing": through or {}}]}
    return {"dp_rank": dp_rank, "workers": [worker(**changes)], "connector": moved}


def test_equal_bytes_on_every_worker_are_evidence() -> None:
    assert kv_round_trip.judge([engine(0), engine(1)])["engines"][1]["dp_rank"] == 1


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (engine(1, differing={LAYER: 3}), f"3 differing bytes in 1 layers of DP1 rank 0, first in {LAYER}, written"),
        (engine(1, through={LAYER: 9}), "9 differing bytes in 1 layers of DP1 rank 0"),
        (engine(1, bytes_per_token=1024.0), "1024 bytes a token in the KV tensors of DP1 rank 0"),
        (engine(1, bytes_written=0), "no KV layer in reach of the workers of DP1"),
    ],
)
def test_one_worker_that_differs_is_named(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckFailedError, match=words):
        kv_round_trip.judge([engine(0), bad])


def test_an_engine_without_a_kv_cache_is_left_out_with_the_reason() -> None:
    with pytest.raises(DoesNotApplyError, match="keeps no KV cache"):
        kv_round_trip.judge([{"dp_rank": 0, "skipped": "the engine keeps no KV cache"}])


class Answers:
    """Stands in for the server: the engines' answers are the test's."""

    def __init__(self, *engines: dict[str, Any]) -> None:
        self.engines = list(engines)

    def control(self, _name: str) -> list[dict[str, Any]]:
        return self.engines


ERROR = {"found": "0 free KV blocks", "wanted": "2", "hint": "Give it more."}


@pytest.mark.parametrize(
    ("engines", "words"),
    [
        ([engine(0)], r"no answer of DP ranks \[1\]"),
        ([engine(0), {"dp_rank": 1, "busy": True}], "DP1 with requests that do not end"),
        ([engine(0), {"dp_rank": 1, "error": ERROR}], r"found 0 free KV blocks \(DP1\); wanted 2. Give it more."),
    ],
)
def test_every_engine_must_have_done_it(engines: list[dict[str, Any]], words: str) -> None:
    context = Context(PLAN, Answers(*engines))  # type: ignore[arg-type]
    with pytest.raises(CheckFailedError, match=words):
        probing.ask(context, "kv_round_trip")


@pytest.mark.parametrize("phase", ["serving", "failed", "draining", "opening"])
def test_a_probe_after_the_smoke_tests_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    monkeypatch.setenv(rundir.ENV, str(tmp_path))
    rundir.write_json(tmp_path / rundir.PHASE, {"phase": "smoke"})
    check_closed()
    rundir.write_json(tmp_path / rundir.PHASE, {"phase": phase})
    with pytest.raises(GateOpenError, match=f"in phase '{phase}'"):
        check_closed()


def test_a_probe_of_a_node_that_tells_no_phase_is_refused_but_where_it_is_headless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(rundir.ENV, raising=False)
    with pytest.raises(GateOpenError, match="in phase None"):
        check_closed()
    monkeypatch.setenv(rundir.ENV, str(tmp_path))
    with pytest.raises(GateOpenError, match="in phase None"):
        check_closed()
    (tmp_path / rundir.HEADLESS).touch()
    check_closed()
    rundir.write_json(tmp_path / rundir.PHASE, {"phase": "serving"})
    with pytest.raises(GateOpenError, match="in phase 'serving'"):
        check_closed()
