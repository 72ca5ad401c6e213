"""The server's phases, kept where every process, the supervisor and ``splint report`` find them."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from patches.framework import log, rundir

__all__ = ["note", "now"]


def now() -> str:
    """UTC with milliseconds, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def note(run_dir: Path, phase: str, drain_s: float, message: str, **facts: Any) -> None:
    """Go on to ``phase``, once, and say so in the log.

    Args:
        run_dir: The server's run directory.
        phase: ``smoke``, ``serving``, ``failed`` or ``draining``.
        drain_s: Seconds that requests in flight are given at the end.
        message: The change for people.
        facts: What belongs to it, for JSON lines.
    """
    told = rundir.read_json(run_dir / rundir.PHASE) or {}
    if told.get("phase") == phase:
        return
    since = now()
    history = [*told.get("history", ()), {"phase": phase, "since": since}]
    content = {"phase": phase, "since": since, "drain_s": drain_s, "history": history}
    rundir.write_json(run_dir / rundir.PHASE, content)
    log.tell("phase", message, phase=phase, **facts)
