"""What unavailability cost in this process, counted by kind and reason. Never on a path without trouble."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["add", "snapshot"]

_counts: Counter[tuple[str, str]] = Counter()
_lock = threading.Lock()


def add(what: str, reason: str, count: int = 1) -> None:
    """Count ``what``: ``lookups_given_up``, ``stores_lost``, ``loads_recomputed``, ``disconnects``, ``silences``."""
    with _lock:
        _counts[what, reason] += count


def snapshot() -> dict[tuple[str, str], int]:
    """All counts so far by (what, reason)."""
    with _lock:
        return dict(_counts)
