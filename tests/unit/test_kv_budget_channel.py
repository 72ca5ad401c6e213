"""DP0 holds the store, so it goes last: once every rank knows why, or after two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.simulated_ranks import store

from patches.kv_budget import channel
from patches.kv_budget.channel import END, Channel


@pytest.fixture
def ranks() -> Iterator[list[Channel]]:
    server = store()
    yield [Channel(server.clone(), rank, 3) for rank in range(3)]
    del server


class Late:
    """A store in which the last word comes between the limit and the look who is missing."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def wait(self, keys: list[str], limit: Any) -> None:
        try:
            self.inner.wait(keys, limit)
        finally:
            self.inner.set(keys[-1], "late")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_word_that_comes_with_the_limit_is_heard() -> None:
    """Else the refusal named nobody: ``KV budget:  did not report within 60 s (hello, missing ranks [])``."""
    assert Channel(Late(store()), 0, 2).hear("hello", 1, 0.05) == "late"


def seconds(ranks: list[Channel], what: str, but: int | None = None) -> float:
    started = time.monotonic()
    ranks[0].heard(what, but)
    return time.monotonic() - started


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DP0 waits for comes, however busy the machine is."""
    monkeypatch.setattr(channel, "HEARD_WITHIN_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_dp0_stays_until_the_last_rank_has_heard(ranks: list[Channel]) -> None:
    begun: list[str] = []

    def hear_late() -> None:
        begun.append(END)
        ranks[2].heard(END)

    ranks[1].heard(END)
    late = threading.Timer(0.3, hear_late)
    late.start()
    assert seconds(ranks, END) < 30
    assert begun, "DP0 did not stay"
    late.join()


def test_what_was_heard_before_does_not_count_for_what_comes_later(
    ranks: list[Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the mode only reports: a refusal is heard, and the start goes on."""
    monkeypatch.setattr(channel, "HEARD_WITHIN_S", 0.3)
    for topic in ("hello", "measured"):
        for rank in reversed(ranks):
            rank.heard(topic)
    assert seconds(ranks, END) > 0.25


@pytest.mark.usefixtures("patient")
def test_the_rank_that_failed_is_not_waited_for(ranks: list[Channel]) -> None:
    ranks[1].heard(END)
    assert seconds(ranks, END, but=2) < 30
