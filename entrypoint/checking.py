"""What the preflight and the smoke tests share: how a check says no, and how none takes longer than it may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["CheckFailedError", "DoesNotApplyError", "Evidence", "InTime", "Outcome"]

Evidence = dict[str, Any]
Outcome = tuple[str, str, Evidence]
"""Status, reason and evidence."""

_BROKEN = "found a fault in the check itself; wanted a result. Report the traceback in the log."


class CheckFailedError(Exception):
    """Something is not as a check wants it: what was found, what was wanted, what to do.

    ``evidence`` goes into the result beside the message.
    """

    def __init__(self, found: str, wanted: str, hint: str, evidence: Evidence | None = None) -> None:
        self.found = found
        self.wanted = wanted
        self.hint = hint
        self.evidence = evidence or {}
        super().__init__(f"found {found}; wanted {wanted}. {hint}")


class DoesNotApplyError(Exception):
    """A check learnt that it has nothing to test; the message is the reason.

    ``evidence`` holds what it found all the same.
    """

    def __init__(self, reason: str, evidence: Evidence | None = None) -> None:
        self.evidence = evidence or {}
        super().__init__(reason)


class InTime:
    """A check that runs in a thread of its own: one that hangs can't be stopped, but it can be left behind."""

    def __init__(self, name: str, run: Callable[[], Outcome]) -> None:
        self._outcome: list[Outcome] = []
        self._thread = threading.Thread(target=lambda: self._outcome.append(run()), name=name, daemon=True)
        self._thread.start()

    def outcome(self, limit_s: float, hint: str) -> Outcome:
        """What came out within ``limit_s`` seconds from now, else a failure that ends with ``hint``."""
        self._thread.join(limit_s)
        hangs = self._thread.is_alive()  # asked first: it may end at this moment, with an outcome
        if self._outcome:
            return self._outcome[0]
        return "failed", late(limit_s, hint) if hangs else _BROKEN, {}


def late(limit_s: float, hint: str) -> str:
    """The reason of a check without a result."""
    return f"found no result after {limit_s:.1f} s; wanted one in that time. {hint}"
