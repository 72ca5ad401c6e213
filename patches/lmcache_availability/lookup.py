"""The scheduler's look-ups: one that is not sent or awaited is a miss, and none is awaited for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework import tallies
from patches.framework.records import Seam
from patches.lmcache_availability.abandoned import Abandoned, Lookup
from patches.lmcache_availability.connection import give_up_now, unlimited
from patches.lmcache_availability.limits import prefetch_limit_s

__all__ = ["check_lookup_result", "maybe_submit_lookup_request"]

_LAST = "splint_last_unsent"
_ENDED = "splint_ended_lookups"
_WAITING = "splint_waiting_lookups"
_ABANDONED = "splint_abandoned_lookups"
_KEPT = 64


def maybe_submit_lookup_request(seam: Seam) -> Callable[..., None]:
    """Count a request whose prompt is computed without a look-up; the scheduler may ask for it again and again."""
    original = seam.original

    @wraps(original)
    def submit(self: Any, request_id: str, *args: Any, **kwargs: Any) -> None:
        seam.count()
        if not self.is_healthy and vars(self).get(_LAST) != request_id:
            setattr(self, _LAST, request_id)
            tallies.miss("server_away", "server", "no LMCache server answers; prompts are computed")
        if request_id in _abandoned(self) and request_id not in self._pending_lookups:
            _end(self, request_id)  # a second look-up under this name would take the first one's locks for its own
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
        if found is None:
            return _in_time(self, request_id)
        vars(self).setdefault(_WAITING, {}).pop(request_id, None)  # it may be looked up again, after a preemption
        return found

    return checked


def _in_time(adapter: Any, request_id: str) -> int | None:
    """None while the server may still take its time with a look-up, else no tokens.

    Only a server that has just said "not yet" is late. One that is done, or whose answer is on its way, would have its
    word ignored by an engine whose last step was a long one; where it does not answer, another limit holds.
    """
    waiting: dict[str, float] = vars(adapter).setdefault(_WAITING, {})
    now = time.monotonic()
    since = waiting.setdefault(request_id, now)
    if len(waiting) > 2 * len(adapter._pending_lookups) + _KEPT:
        for ended in waiting.keys() - adapter._pending_lookups:
            del waiting[ended]
    if now - since < prefetch_limit_s() or not _said_not_yet(adapter, request_id):
        return None
    _abandon(adapter, request_id)
    return 0


def _said_not_yet(adapter: Any, request_id: str) -> bool:
    """Whether a server is known to be at work on it: it has no result, and no question is under way."""
    if request_id in adapter._unacked_lookups:
        return False
    heard = adapter._per_server_hits.get(request_id, {}).keys() | adapter._lookup_status.get(request_id, {}).keys()
    return any(url not in heard for url in adapter._server_urls)


def _abandon(adapter: Any, request_id: str) -> None:
    """Go on without the server's result, and see to it that what it locks is free again."""
    token_ids, salt, configs = adapter._lookup_params.get(request_id, ([], "", None))

    def give_back(chunks: int) -> None:
        end = chunks * adapter.lmcache_tokens_per_chunk
        adapter.free_lookup_locks(token_ids, 0, end, request_id, cache_salt=salt, request_configs=configs)

    questions = {url: unlimited(asked) for url, (asked, _) in adapter._lookup_status.pop(request_id, {}).items()}
    hits = adapter._per_server_hits.pop(request_id, {})
    _abandoned(adapter).add(Lookup(request_id, give_back, hits, questions))
    _end(adapter, request_id)


def _end(adapter: Any, request_id: str) -> None:
    """Let the scheduler find nothing, however often it asks for this look-up."""
    vars(adapter).setdefault(_WAITING, {}).pop(request_id, None)
    adapter._pending_lookups.add(request_id)
    adapter._finished_lookup_results[request_id] = 0
    tallies.miss(
        "prefetch_unfinished",
        "server",
        f"the LMCache server did not find out within {prefetch_limit_s():g} s (SPLINT_LMCACHE_PREFETCH_TIMEOUT_S) what"
        " its second level has, or has not brought it; the prompt is computed",
    )


def _abandoned(adapter: Any) -> Abandoned:
    found: Abandoned | None = vars(adapter).get(_ABANDONED)
    if found is None:
        found = vars(adapter)[_ABANDONED] = Abandoned(adapter)
    return found


def _give_up(adapter: Any, request_id: str) -> None:
    """End what the look-up waits for, which counts it; between two questions it waits for nothing."""
    acknowledgement = adapter._unacked_lookups.get(request_id)
    futures = [] if acknowledgement is None else [*acknowledgement.futures.values()]
    futures += [future for future, _ in adapter._lookup_status.get(request_id, {}).values()]
    for future in futures:
        give_up_now(future)
    if not futures:
        tallies.miss("lookup_unanswered", "server", "the LMCache server is away; the prompt is computed")
