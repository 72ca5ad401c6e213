"""A patch that is applied and never called fails the smoke tests, by its seam and process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import patches
from entrypoint.smoke.check import CheckFailedError
from entrypoint.smoke.checks.exercised import judge
from patches.framework import rundir
from patches.framework.records import Exercise, Feature, Patch, Role, Target

RECORD = Patch(
    id="mended", purpose="", fault="", library="vllm", releases="", roles=frozenset({Role.WORKER}), retires="",
    exercised_by="every step", targets=(Target("vllm.core", "Engine.step", ""), Target("vllm.core", "Engine.init", "")),
    exercises=(
        Exercise(Role.WORKER, ("Engine.step", "Engine.init")),
        Exercise(Role.ENGINE_CORE, ("Engine.step",), frozenset({Feature.LMCACHE})),
    ),
)  # fmt: skip


def process(role: Role, state: str = "applied", alive: bool = True, **calls: int) -> dict[str, Any]:
    return {
        "role": role.value, "dp_rank": 1, "rank": 0, "alive": alive,
        "patches": [{"id": "mended", "state": state}],
        "calls": {f"vllm.core:Engine.{name}": count for name, count in calls.items()},
    }  # fmt: skip


def test_calls_are_summed_over_processes() -> None:
    found = judge([RECORD], [process(Role.WORKER, step=2), process(Role.WORKER, init=1)], ())
    assert found == {"calls": {"mended": 3}, "not_exercised": {}}


@pytest.mark.parametrize("state", ["applied", "pending"])
def test_a_seam_that_was_never_called_is_named_with_its_process(state: str) -> None:
    with pytest.raises(CheckFailedError, match=r"mended: Engine\.step or Engine\.init in worker DP1 rank 0"):
        judge([RECORD], [process(Role.WORKER, init=1), process(Role.WORKER, state, step=0, init=0)], ())


@pytest.mark.parametrize("state", ["off", "inert", "not_applicable"])
def test_a_patch_that_is_not_needed_need_not_be_called(state: str) -> None:
    assert judge([RECORD], [process(Role.WORKER, state)], ())["calls"] == {}


def test_a_patch_for_other_machines_is_pending_and_owes_nothing() -> None:
    elsewhere = replace(RECORD, condition="somewhere:else")
    assert judge([elsewhere], [process(Role.WORKER, "pending")], ())["calls"] == {}
    with pytest.raises(CheckFailedError):
        judge([elsewhere], [process(Role.WORKER)], ())


def test_a_dead_process_owes_nothing() -> None:
    assert judge([RECORD], [process(Role.WORKER, alive=False)], ())["calls"] == {}


def test_what_only_some_servers_do_is_asked_of_those() -> None:
    idle = process(Role.ENGINE_CORE, step=0)
    assert judge([RECORD], [idle], ())["not_exercised"] == {"mended": "every step"}
    with pytest.raises(CheckFailedError, match="engine_core DP1"):
        judge([RECORD], [idle], ("lmcache",))


@pytest.mark.parametrize("patch", patches.catalogue(), ids=lambda patch: str(patch.id))
def test_every_seam_that_a_record_names_is_a_target_of_it(patch: Patch) -> None:
    targets = {target.qualname for target in patch.targets}
    for exercise in patch.exercises:
        assert set(exercise.seams) <= targets
        assert exercise.role in patch.roles


@pytest.mark.parametrize("patch", patches.catalogue(), ids=lambda patch: str(patch.id))
def test_every_record_says_what_exercises_it_in_each_role_or_why_nothing_does(patch: Patch) -> None:
    uncovered = patch.roles - {exercise.role for exercise in patch.exercises}
    assert bool(uncovered) == bool(patch.unexercised), uncovered


def test_the_check_reads_the_counters_of_the_run_directory(tmp_path: Path) -> None:
    from support.fake_engine import PLAN

    from entrypoint.smoke.check import Context
    from entrypoint.smoke.checks.exercised import run

    rundir.prepare(tmp_path)
    assert run(Context(PLAN, None, tmp_path)) == {"calls": {}, "not_exercised": {}}  # type: ignore[arg-type]


def test_a_process_that_is_still_starting_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.fake_engine import PLAN

    from entrypoint.smoke.check import Context
    from entrypoint.smoke.checks import exercised

    readings = iter([[process(Role.WORKER, step=0)], [process(Role.WORKER, step=1)]])
    monkeypatch.setattr("entrypoint.smoke.checks.exercised.patches.catalogue", lambda: (RECORD,))
    monkeypatch.setattr("entrypoint.smoke.checks.exercised.roster.load", lambda _run_dir: next(readings))
    found = exercised.run(Context(PLAN, None, tmp_path))  # type: ignore[arg-type]
    assert found["calls"] == {"mended": 1}
