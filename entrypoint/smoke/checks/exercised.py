"""Every patch that is needed has done its work in every process that needs it: applied is not yet exercised."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import patches
from entrypoint.smoke.check import Check, CheckFailedError, Context, Evidence
from patches.framework import roster
from patches.framework.application import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from patches.framework.records import Exercise, Patch
    from patches.serving_gate.plan import SmokePlan

__all__ = ["CHECK", "judge"]

STARTED_WITHIN_S = 10.0

_APPLIED = frozenset({State.APPLIED.value})
_NEEDED = _APPLIED | {State.PENDING.value}


def applies(plan: SmokePlan) -> str | None:
    return None if plan.expected_roster else "the server was given no roster to read call counters from"


def _owed(patch: Patch, entry: dict[str, Any], features: frozenset[str]) -> Iterator[Exercise]:
    """What a process must have done for a patch; nothing where the patch is off, inert or not applicable there.

    A patch for some machines only is pending on all others: they never import what it is for.
    """
    states = {found["id"]: found["state"] for found in entry["patches"]}
    if states.get(patch.id) not in (_APPLIED if patch.condition else _NEEDED):
        return
    for exercise in patch.exercises:
        if exercise.role.value == entry["role"] and {feature.value for feature in exercise.where} <= features:
            yield exercise


def _calls(entry: dict[str, Any], exercise: Exercise) -> int:
    return sum(count for seam, count in entry["calls"].items() if seam.partition(":")[2] in exercise.seams)


def judge(records: Iterable[Patch], processes: list[dict[str, Any]], features: Iterable[str]) -> Evidence:
    """Calls by patch, and for patches that the smoke tests can't exercise what would.

    Raises:
        CheckFailedError: a counter that should have moved in a living process did not.
    """
    living = [entry for entry in processes if entry["alive"]]
    had = frozenset(features)
    problems: list[str] = []
    calls: dict[str, int] = {}
    left: dict[str, str] = {}
    for patch in records:
        owed = [(entry, exercise) for entry in living for exercise in _owed(patch, entry, had)]
        for entry, exercise in owed:
            count = _calls(entry, exercise)
            calls[patch.id] = calls.get(patch.id, 0) + count
            if not count:
                problems.append(f"{patch.id}: {' or '.join(exercise.seams)} in {roster.name_of(entry)}")
        if not owed and any(_applied(patch, entry) for entry in living):
            left[patch.id] = f"{patch.exercised_by}. {patch.unexercised}".removesuffix(". ")
    if problems:
        raise CheckFailedError(
            f"patches that nobody has called: {'; '.join(problems)}",
            "a call of each by now: the start and the smoke tests go through all of them",
            "The patched code is no longer on the way that this server takes: report it with the engine's arguments.",
            {"problems": problems},
        )
    return {"calls": calls, "not_exercised": left}


def _applied(patch: Patch, entry: dict[str, Any]) -> bool:
    return any(found["id"] == patch.id and found["state"] == State.APPLIED.value for found in entry["patches"])


def run(context: Context) -> Evidence:
    if context.run_dir is None:
        raise CheckFailedError("no run directory", "the folder with the attestations", "Set SPLINT_RUN_DIR.")
    records, deadline = patches.catalogue(), time.monotonic() + STARTED_WITHIN_S
    while True:
        try:
            return judge(records, roster.load(context.run_dir), context.plan.features)
        except CheckFailedError:
            # Other API servers may still be on the way to listening.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


CHECK = Check("exercised", "Every needed patch was called in every process that needs it.", applies, run, share=0.15)
