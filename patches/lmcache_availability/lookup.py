"""The scheduler's look-ups: one that is not sent or awaited, because the server is away, is a miss, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework import tallies
from patches.framework.records import Seam
from patches.lmcache_availability.connection import give_up_now

__all__ = ["check_lookup_result", "maybe_submit_lookup_request"]

_LAST = "splint_last_unsent"
_ENDED = "splint_ended_lookups"


def maybe_submit_lookup_request(seam: Seam) -> Callable[..., None]:
    """Count a request whose prompt is computed without a look-up; the scheduler may ask for it again and again."""
    original = seam.original

    @wraps(original)
    def submit(self: Any, request_id: str, *args: Any, **kwargs: Any) -> None:
        seam.count()
        if not self.is_healthy and vars(self).get(_LAST) != request_id:
            setattr(self, _LAST, request_id)
            tallies.miss("server_away", "server", "no LMCache server answers; prompts are computed")
        original(self, request_id, *args, **kwargs)

    return submit


def check_lookup_result(seam: Seam) -> Callable[..., int | None]:
    """LMCache ends a look-up under way where it sees first that the server is away; that is counted, too, and once."""
    original = seam.original

    @wraps(original)
    def checked(self: Any, request_id: str) -> int | None:
        seam.count()
        waiting = request_id in self._pending_lookups and request_id not in self._finished_lookup_results
        ended: set[str] = vars(self).setdefault(_ENDED, set())
        if waiting and not self.is_healthy and request_id not in ended:
            _give_up(self, request_id)
        found: int | None = original(self, request_id)
        if waiting and found == 0 and request_id not in self._finished_lookup_results:
            ended &= self._pending_lookups
            ended.add(request_id)
        return found

    return checked


def _give_up(adapter: Any, request_id: str) -> None:
    """End what the look-up waits for, which counts it; between two questions it waits for nothing."""
    acknowledgement = adapter._unacked_lookups.get(request_id)
    futures = [] if acknowledgement is None else [*acknowledgement.futures.values()]
    futures += [future for future, _ in adapter._lookup_status.get(request_id, {}).values()]
    for future in futures:
        give_up_now(future)
    if not futures:
        tallies.miss("lookup_unanswered", "server", "the LMCache server is away; the prompt is computed")
