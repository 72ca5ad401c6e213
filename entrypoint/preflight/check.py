"""What a preflight check is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from entrypoint.checking import CheckFailedError, DoesNotApplyError, Evidence

if TYPE_CHECKING:
    from collections.abc import Callable

    from entrypoint.preflight.subject import Subject

__all__ = ["REFUSE", "WARN", "Check", "CheckFailedError", "DoesNotApplyError", "Evidence", "always", "on_gpus"]

REFUSE = "refuse"
WARN = "warn"


def always(subject: Subject) -> str | None:
    """For checks that apply everywhere."""
    del subject
    return None


def on_gpus(subject: Subject) -> str | None:
    """For checks of the devices."""
    return subject.no_gpu or ("the driver can't be read" if subject.unreadable else None)


@dataclass(frozen=True)
class Check:
    """One check as data.

    Attributes:
        id: Short and unique.
        proves: One sentence for tables and results.
        severity: ``refuse`` where the server can't work or would be wrong without it, else ``warn``.
        limit_s: Seconds that it may take; what runs on a device is killed then.
        applies: None where the check is to run, else the reason why not.
        run: Returns evidence, or raises :class:`CheckFailedError` or :class:`DoesNotApplyError`.
    """

    id: str
    proves: str
    severity: str
    limit_s: float
    applies: Callable[[Subject], str | None]
    run: Callable[[Subject], Evidence]
