"""The processor time of our own start-up work in this process, by phase. Waiting for a busy core is not our work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time

__all__ = ["phase", "phases_ms"]

_seconds: dict[str, float] = {}
_running: list[str] = []


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Add the processor time of the block to phase ``name``; time inside a nested phase counts only there."""
    start = thread_time()
    _running.append(name)
    try:
        yield
    finally:
        spent = thread_time() - start
        _running.pop()
        _seconds[name] = _seconds.get(name, 0.0) + spent
        if _running:
            _seconds[_running[-1]] = _seconds.get(_running[-1], 0.0) - spent


def phases_ms() -> dict[str, float]:
    """Milliseconds spent in each phase so far."""
    return {name: round(seconds * 1000, 3) for name, seconds in _seconds.items()}
