"""How a server ends, as data: how long each kind of end may take, and the exit code it gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from patches.framework.errors import EXIT_REFUSED, EXIT_SMOKE_FAILED

__all__ = ["Course", "End", "Outcome", "Patience", "exit_code", "patience"]

TEARDOWN_S = 6.0
_BY_SIGNAL = 128


class End(Enum):
    """Why the server ends."""

    STOPPED = "stopped"
    DIED = "a process died"
    REFUSED = "refused"
    SMOKE_FAILED = "the smoke tests failed"


@dataclass(frozen=True)
class Patience:
    """Seconds from the event until vLLM is sent SIGTERM, and until all that is left is killed."""

    until_term: float
    until_kill: float


# vLLM gets a moment to end by itself, so that its own last lines reach the log. With the 4 s at most that
# clearing away takes, the sum stays under the promised 10 s.
_PATIENCE = {
    End.STOPPED: Patience(0.0, 5.0),
    End.DIED: Patience(2.0, 4.5),
    End.REFUSED: Patience(2.5, 4.5),
    End.SMOKE_FAILED: Patience(0.5, 3.0),
}


def patience(end: End, drain_s: float | None) -> Patience:
    """How long the server may take over ``end``.

    Args:
        end: Why it ends.
        drain_s: Seconds granted to requests in flight, or None where nothing is being served yet.
    """
    if end is End.STOPPED and drain_s is not None:
        return Patience(0.0, drain_s + TEARDOWN_S)
    return _PATIENCE[end]


class Course:
    """The course of one end: when it is time for which step. Times are those of ``time.monotonic``."""

    def __init__(self) -> None:
        self._term_at = math.inf
        self._kill_at = math.inf

    @property
    def begun(self) -> bool:
        """Whether the server is being ended."""
        return self._kill_at < math.inf

    @property
    def next_step(self) -> float:
        """When the next step is due; infinity where none is."""
        return min(self._term_at, self._kill_at)

    def begin(self, now: float, granted: Patience) -> None:
        """Set the times, unless an end has begun: that one keeps its own."""
        if not self.begun:
            self._term_at = now + granted.until_term
            self._kill_at = now + granted.until_kill

    def hurry(self, now: float) -> None:
        """Have everything killed at once."""
        self._kill_at = now

    def term_due(self, now: float) -> bool:
        """Whether vLLM is to be sent SIGTERM; true once."""
        due = now >= self._term_at
        if due:
            self._term_at = math.inf
        return due

    def kill_due(self, now: float) -> bool:
        """Whether the time is up."""
        return now >= self._kill_at


@dataclass
class Outcome:
    """What is known about a server's end.

    Attributes:
        stop_signal: The signal that asked for the end, or None.
        served: Whether requests were being served when the end was asked for.
        enforced: Whether vLLM was still there when its time was up, and was killed.
        refused: Whether a process refused to serve.
        smoke_failed: Whether the smoke tests failed.
        died: Whether a process of the server died.
        engine_seen: Whether an engine had come up far enough to attest.
        main_code: vLLM's own exit code, 128 plus the number where a signal ended it.
    """

    stop_signal: int | None = None
    served: bool = False
    enforced: bool = False
    refused: bool = False
    smoke_failed: bool = False
    died: bool = False
    engine_seen: bool = False
    main_code: int = 0

    @property
    def ended_unasked(self) -> bool:
        """Whether vLLM says that all is well although it had an engine and nobody asked it to end."""
        known = self.stop_signal is not None or self.refused or self.smoke_failed or self.died
        return not known and self.engine_seen and self.main_code == 0


def exit_code(outcome: Outcome) -> int:
    """The exit code of the whole server.

    ========================================  =====================================
    stopped as asked                          0
    stopped, but requests had to be cut off   128 + the signal's number
    refused                                   78
    smoke tests failed                        70
    an engine, worker or other process died   vLLM's own code, or 1 where that is 0
    ended unasked after an engine was up      vLLM's own code, or 1 where that is 0
    anything else                             vLLM's own code
    ========================================  =====================================
    """
    if outcome.stop_signal is not None:
        return 128 + outcome.stop_signal if outcome.enforced and outcome.served else 0
    if outcome.refused:
        return EXIT_REFUSED
    if outcome.smoke_failed:
        return EXIT_SMOKE_FAILED
    if outcome.died:  # a signal that ended vLLM after that was most likely our own
        return outcome.main_code if 0 < outcome.main_code < _BY_SIGNAL else 1
    return 1 if outcome.ended_unasked else outcome.main_code
