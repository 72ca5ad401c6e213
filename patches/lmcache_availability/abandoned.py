"""Look-ups that the engine gave up while the server goes on with them: what it locks for them is given back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from patches.lmcache_availability.connection import link_of, unlimited

__all__ = ["Abandoned", "Lookup"]

ASKED_EVERY_S = 0.5
KEPT_S = 600.0
"""Twice the time after which LMCache's read locks run out by themselves (``--l1-read-ttl-seconds``)."""


@dataclass
class Lookup:
    """One look-up that was given up.

    Attributes:
        request_id: Of the request that was looked up.
        give_back: Frees the locks of the first so many chunks.
        hits: Chunks that a server has found and locked, by its address, where it has said so.
        questions: Those under way: a server says only once what it has found.
        since: When it was given up, on the monotonic clock, in seconds.
    """

    request_id: str
    give_back: Callable[[int], None]
    hits: dict[str, int] = field(default_factory=dict)
    questions: dict[str, Any] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)


class Abandoned:
    """The look-ups of one scheduler that were given up, and a thread that lives as long as there are any.

    Args:
        adapter: LMCache's ``LMCacheMPSchedulerAdapter``.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._lookups: dict[str, Lookup] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._lookups

    def add(self, lookup: Lookup) -> None:
        """Ask on until the server is done with it, then give back."""
        with self._lock:
            self._lookups[lookup.request_id] = lookup
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._settle, name="splint-lookups", daemon=True)
                self._thread.start()

    def _settle(self) -> None:
        while True:
            time.sleep(ASKED_EVERY_S)
            with self._lock:
                lookups = [*self._lookups.values()]
            over = [lookup.request_id for lookup in lookups if self._over(lookup)]
            with self._lock:
                for request_id in over:
                    del self._lookups[request_id]
                if not self._lookups:
                    self._thread = None
                    return

    def _over(self, lookup: Lookup) -> bool:
        clients = self._adapter.req_clients
        closing = any(link_of(client).closing for client in clients.values())
        if closing or time.monotonic() - lookup.since > KEPT_S:
            return True
        if not self._adapter.is_healthy:
            return False
        for url in clients.keys() - lookup.hits.keys():
            found = _answer(lookup, url, clients[url])
            if found is not None:
                lookup.hits[url] = found
        if len(lookup.hits) < len(clients):
            return False
        if any(lookup.hits.values()):
            lookup.give_back(max(lookup.hits.values()))
        return True


def _answer(lookup: Lookup, url: str, client: Any) -> int | None:
    """Chunks that the server has found; None where it is not done, or has not answered yet."""
    question = lookup.questions.get(url)
    if question is None:
        # Nobody waits for the answer, so it is never overdue.
        lookup.questions[url] = unlimited(client.query_prefetch_status(lookup.request_id))
        return None
    if not question.query():
        return None
    del lookup.questions[url]
    try:
        found: int | None = question.result(timeout=0)
    except TimeoutError:
        return None  # the server is gone; one that comes in its place is asked, too, and knows of nothing
    return found
