"""After the opening: why this server should get no new requests, looked at once a second and never by a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from patches.framework import roster
from patches.framework.records import Role

__all__ = ["Members", "Readiness", "look_after"]

LOOK_EVERY_S = 1.0

Look = Callable[[], "str | None"]


class Readiness:
    """Reasons by source; none while the server is to get requests.

    Args:
        tell: Called with the source and the reason, or None, when a source changes its mind.
    """

    def __init__(self, tell: Callable[[str, str | None], None]) -> None:
        self._tell = tell
        self._reasons: dict[str, str] = {}

    @property
    def reasons(self) -> list[str]:
        """One sentence a source, in the order in which they came."""
        return list(self._reasons.values())

    def put(self, source: str, reason: str | None) -> None:
        """Note what ``source`` found; None takes its earlier reason back."""
        if self._reasons.get(source) == reason:
            return
        if reason is None:
            del self._reasons[source]
        else:
            self._reasons[source] = reason
        self._tell(source, reason)


class Members:
    """The processes that the smoke tests found attested. Named by pid and start time: a pid alone is used again.

    An LMCache server is left out: without it the server recomputes, which costs hits and no request.
    """

    def __init__(self, attested: Iterable[Mapping[str, Any]]) -> None:
        self._members = [
            (entry["pid"], entry["start_time"], roster.name(entry))
            for entry in attested
            if entry["alive"] and entry["role"] != Role.LMCACHE_SERVER.value
        ]

    @classmethod
    def of(cls, run_dir: Path) -> Members:
        """Those that have attested in ``run_dir``."""
        return cls(roster.load(run_dir))

    def look(self) -> str | None:
        """Who is gone, or None. Linear in processes, some 20 µs each."""
        gone = [f"{name} (pid {pid})" for pid, started, name in self._members if roster.start_time(pid) != started]
        return f"gone: {', '.join(gone)}" if gone else None


async def look_after(readiness: Readiness, looks: Mapping[str, Look], every_s: float = LOOK_EVERY_S) -> None:
    """Have each look taken, now and every ``every_s`` seconds, until cancelled.

    A look that raises makes the server unready: what can't be seen is not taken for well.
    """
    while True:
        for source, look in looks.items():
            try:
                readiness.put(source, look())
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the watch in silence
                readiness.put(source, f"{source} can't be looked at: {type(error).__name__}: {error}")
        await asyncio.sleep(every_s)
