"""Clearing away: once a server has ended, nothing that descends from it may be left."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from patches.supervision import processes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LONGEST_S", "clear_away"]

_PACE_S = 0.05
_AFTER_TERM_S = 0.5
_AFTER_KILL_S = 0.65
_TRACKERS_S = 1.2
LONGEST_S = _AFTER_TERM_S + _AFTER_KILL_S + _TRACKERS_S + _AFTER_KILL_S


def clear_away(reap: Callable[[], None], by_themselves_s: float) -> list[int]:
    """End every descendant of this process, at the latest ``by_themselves_s`` + :data:`LONGEST_S` from now.

    The trackers of shared memory come last: they unlink what the others left, and then end by themselves.

    Args:
        reap: Collects ended children.
        by_themselves_s: Seconds in which processes may end by themselves; 0 kills them at once.

    Returns:
        The pids that had to be killed.
    """
    if by_themselves_s > 0:
        _wait_for(_others, reap, by_themselves_s)
        _signal(_others(), signal.SIGTERM)
        _wait_for(_others, reap, _AFTER_TERM_S)
    killed = _kill(_others, reap)
    _wait_for(_all, reap, _TRACKERS_S)
    return killed + _kill(_all, reap)


def _all() -> list[int]:
    return processes.descendants(os.getpid())


def _others() -> list[int]:
    return [pid for pid in _all() if not processes.is_resource_tracker(pid)]


def _wait_for(living: Callable[[], list[int]], reap: Callable[[], None], seconds: float) -> bool:
    """Whether no process that ``living`` names is left within ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        gone = not living()
        # After the look: who ended just before it must not be left to init as a zombie.
        reap()
        if gone:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PACE_S)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        processes.send(pid, number)


def _kill(living: Callable[[], list[int]], reap: Callable[[], None]) -> list[int]:
    """Kill until nobody is left: one that is being killed may just have forked."""
    killed: dict[int, None] = {}
    deadline = time.monotonic() + _AFTER_KILL_S
    while (pids := living()) and time.monotonic() < deadline:
        _signal(pids, signal.SIGKILL)
        killed.update(dict.fromkeys(pids))
        _wait_for(living, reap, _PACE_S)
    return list(killed)
