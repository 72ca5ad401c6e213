"""One line on stderr for each change of state: for people, or as JSON with ``SPLINT_LOG=json``.

Standard library only, and without ``logging``: it speaks in the supervising parent and before vLLM has set up its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

__all__ = ["SETTING", "line", "tell"]

SETTING = "SPLINT_LOG"


def tell(event: str, message: str, **facts: Any) -> None:
    """Write one line, whole, even where nobody reads it any more.

    Args:
        event: What happened, as a word to search for: ``phase``, ``died``, ``refused``.
        message: The same for people.
        facts: JSON values that belong to it; only JSON lines carry them.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{line(event, message, **facts)}\n".encode(errors="replace"))


def line(event: str, message: str, **facts: Any) -> str:
    """What :func:`tell` writes, without the line's end."""
    if os.environ.get(SETTING) != "json":
        return f"splint: {message}"
    import json

    told = {"time": _now(), "logger": "splint", "event": event, "message": message, "pid": os.getpid(), **facts}
    return json.dumps(told, default=str)


def _now() -> str:
    """UTC with milliseconds, in the form of RFC 3339."""
    seconds = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
