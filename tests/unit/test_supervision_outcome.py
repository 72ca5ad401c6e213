from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.supervision import clearing, parent
from patches.supervision.outcome import Course, End, Outcome, Patience, exit_code, patience

STOP = int(signal.SIGTERM)


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({}, 0),
        ({"main_code": 2}, 2),
        ({"main_code": 137}, 137),
        ({"engine_seen": True}, 1),
        ({"engine_seen": True, "main_code": 3}, 3),
        ({"engine_seen": True, "main_code": 139}, 139),
        ({"died": True}, 1),
        ({"died": True, "main_code": 3}, 3),
        ({"died": True, "main_code": 143}, 1),
        ({"died": True, "main_code": 137}, 1),
        ({"smoke_failed": True, "main_code": 143}, 70),
        ({"refused": True, "main_code": 1}, 78),
        ({"refused": True, "smoke_failed": True}, 78),
        ({"refused": True, "died": True}, 78),
        ({"stop_signal": STOP}, 0),
        ({"stop_signal": STOP, "main_code": 143}, 0),
        ({"stop_signal": STOP, "engine_seen": True}, 0),
        ({"stop_signal": STOP, "enforced": True, "main_code": 137}, 0),
        ({"stop_signal": STOP, "enforced": True, "served": True, "main_code": 137}, 143),
        ({"stop_signal": int(signal.SIGINT), "enforced": True, "served": True}, 130),
        ({"stop_signal": STOP, "served": True}, 0),
    ],
)
def test_exit_code_table(facts: dict[str, Any], code: int) -> None:
    assert exit_code(Outcome(**facts)) == code


@given(
    st.builds(
        Outcome, stop_signal=st.none(), refused=st.booleans(), smoke_failed=st.booleans(), died=st.booleans(),
        engine_seen=st.booleans(), enforced=st.booleans(), served=st.booleans(), main_code=st.integers(0, 255),
    )
)  # fmt: skip
def test_no_end_that_nobody_asked_for_is_a_success(outcome: Outcome) -> None:
    failed = outcome.refused or outcome.smoke_failed or outcome.died or outcome.engine_seen or outcome.main_code
    assert (exit_code(outcome) == 0) is not bool(failed)


@pytest.mark.parametrize("end", list(End))
@pytest.mark.parametrize("drain_s", [None, 0.0, 5.0, 300.0])
def test_every_end_takes_at_most_ten_seconds_and_the_drain(end: End, drain_s: float | None) -> None:
    cleared = parent._ORPHANS_S + clearing.LONGEST_S
    noticed = parent._LOOK_EVERY_S if end is not End.STOPPED else 0.0
    assert noticed + patience(end, drain_s).until_kill + cleared <= 10.0 + (drain_s or 0.0)


def test_end_that_has_begun_keeps_its_times() -> None:
    course = Course()
    course.begin(100.0, Patience(2.0, 4.0))
    course.begin(101.0, Patience(50.0, 60.0))
    assert course.next_step == 102.0
    assert course.kill_due(104.0)


def test_sigterm_falls_due_once() -> None:
    course = Course()
    course.begin(100.0, Patience(0.0, 4.0))
    assert [course.term_due(99.0), course.term_due(100.0), course.term_due(101.0)] == [False, True, False]
    assert course.next_step == 104.0


def test_hurry_makes_the_kill_due_at_once() -> None:
    course = Course()
    course.begin(100.0, Patience(0.0, 300.0))
    course.hurry(101.0)
    assert course.kill_due(101.0)


def test_nothing_is_due_before_an_end_has_begun() -> None:
    course = Course()
    assert not course.begun
    assert not course.term_due(1e12)
    assert not course.kill_due(1e12)
