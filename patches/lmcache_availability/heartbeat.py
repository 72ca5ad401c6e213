"""The heartbeat: it is told of trouble at once, looks often while there is some, and knows its server again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework.records import Seam
from patches.lmcache_availability.connection import link_of
from patches.lmcache_availability.limits import ping_limit_s
from patches.lmcache_availability.link import Link, ServerUnavailableError, State
from patches.lmcache_availability.protection import note, still_protected

__all__ = ["execute", "init", "send_ping"]

RETRY_S = 0.25
FAILED_RECOVERY_RETRY_S = 5.0
_USUAL = "splint_usual_interval"


def init(seam: Seam) -> Callable[..., Any]:
    """Tie the heartbeat and its health event to the client's link."""
    original = seam.original

    @wraps(original)
    def start(self: Any, req_client: Any, health_event: Any, *args: Any, **kwargs: Any) -> None:
        seam.count()
        original(self, req_client, health_event, *args, **kwargs)
        setattr(self, _USUAL, self._interval)
        link_of(req_client).watch(health_event, self.wake)

    return start


def execute(seam: Seam) -> Callable[..., Any]:
    """Beat, and set the pause until the next beat by what this one found."""
    original = seam.original

    @wraps(original)
    def beat(self: Any) -> Any:
        seam.count()
        summary = original(self)
        link = link_of(self._req_client)
        if link.state is not State.ANSWERING:
            # The server may have gone between the answer to the ping and the setting of the event.
            self._health_event.clear()
        note(link, answering=self._health_event.is_set())
        self._interval = _pause_s(self, link)
        return summary

    return beat


def _pause_s(heartbeat: Any, link: Link) -> float:
    usual: float = getattr(heartbeat, _USUAL)
    if heartbeat._health_event.is_set():
        return usual
    # A server that answers but could not be taken back (its registration failed) is not asked four times a second.
    return min(usual, RETRY_S if link.state is not State.ANSWERING else FAILED_RECOVERY_RETRY_S)


def send_ping(seam: Seam) -> Callable[..., Any]:
    """Ping with our own limit; a server is taken back only with the chunk size it had, and only as one of ours."""
    original = seam.original

    @wraps(original)
    def ping(req_client: Any, timeout: float, instance_id: int | None = None) -> bool:
        seam.count()
        link = link_of(req_client)
        if not original(req_client, ping_limit_s(), instance_id):
            link.overdue("ping")
            return False
        if link.state is not State.ANSWERING and not _same_chunks(req_client, link):
            return False
        if not still_protected(req_client, link):
            return False
        link.answered()
        return True

    return ping


def _same_chunks(req_client: Any, link: Link) -> bool:
    """Whether the server still cuts prompts as it did at start: its hit counts are in chunks."""
    try:
        return link.takes_back(req_client.get_chunk_size().result())
    except ServerUnavailableError:
        return False
