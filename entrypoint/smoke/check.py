"""What a check is, what it is given, and how it says no."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from entrypoint.checking import CheckFailedError, DoesNotApplyError, Evidence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from entrypoint.smoke.server import Server
    from patches.serving_gate.plan import SmokePlan

__all__ = ["Check", "CheckFailedError", "Context", "DoesNotApplyError", "Evidence", "always"]


@dataclass
class Context:
    """What every check is given.

    Attributes:
        plan: How to reach the server and what it can do.
        server: The connection to it.
        run_dir: The server's run directory, or None where the smoke tests run from outside.
        secret_passes: Whether the control calls of the closed gate may be used.
    """

    plan: SmokePlan
    server: Server
    run_dir: Path | None = None
    secret_passes: bool = True


def always(plan: SmokePlan) -> str | None:
    """For checks that apply to every server."""
    del plan
    return None


@dataclass(frozen=True)
class Check:
    """One check as data.

    Attributes:
        id: Short and unique, the name of its module.
        proves: One sentence for tables and verdicts.
        applies: None where the check is to run, else the reason why not.
        run: Returns evidence, or raises :class:`CheckFailedError` or :class:`DoesNotApplyError`.
        share: The part of the plan's ``timeout_s`` that it may take.
    """

    id: str
    proves: str
    applies: Callable[[SmokePlan], str | None]
    run: Callable[[Context], Evidence]
    share: float = 0.25
