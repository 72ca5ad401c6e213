"""The connection: pending requests end when it breaks, and no wait outlasts its limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework import tallies
from patches.framework.records import Seam
from patches.lmcache_availability.limits import LIMITED_BY, PROBES, QUIET, first_limit_s, limit_s, message_s
from patches.lmcache_availability.link import Link, ServerUnavailableError, State

__all__ = ["cancel_streams", "close", "give_up_now", "link_of", "query", "submit_request", "unlimited", "wait"]

_LINK = "splint_link"
_WATCH = "splint_watch"
_PING = "splint_ping"
_PING_AGAIN_AFTER_S = 60.0
_LOOKUPS = frozenset({"lookup", "query_prefetch_status"})


class Watch:
    """When a pending request is overdue, and what is done about it then."""

    __slots__ = ("deadline", "link", "operation", "waits")

    def __init__(self, link: Link, operation: str, seconds: float) -> None:
        self.link = link
        self.operation = operation
        self.deadline = time.monotonic() + seconds
        self.waits = seconds > 0

    def left_s(self) -> float:
        """Seconds that the answer may still take."""
        return max(0.0, self.deadline - time.monotonic())

    def give_up(self, future: Any) -> bool:
        """End the request without an answer. A late answer finds it ended and changes nothing."""
        self.link.overdue(self.operation)
        # A look-up that was given up is asked for its result once more, which is not waited for.
        if self.operation in _LOOKUPS and self.waits:
            detail = f"{self.link.url} did not answer {self.operation} in time; the prompt is computed"
            tallies.miss("lookup_unanswered", "server", detail)
        future.set_exception(
            ServerUnavailableError(f"LMCache server {self.link.url} did not answer {self.operation} in time")
        )
        return True


def link_of(client: Any) -> Link:
    """The link of a request client, or of the message queue client inside it."""
    owner = getattr(client, "_message_queue_client", client)
    link: Link | None = vars(owner).get(_LINK)
    if link is None:
        link = vars(owner).setdefault(_LINK, Link())
    return link


def unlimited(future: Any) -> Any:
    """Let this one request take any time."""
    vars(future).pop(_WATCH, None)
    return future


def give_up_now(future: Any) -> None:
    """End a request whose answer is not there yet as if it were overdue; one that has ended stays as it is."""
    watch: Watch | None = vars(future).get(_WATCH)
    if watch is not None:
        watch.deadline = time.monotonic()
        future.query()


def submit_request(seam: Seam) -> Callable[..., Any]:
    """Send, and note when the answer is overdue; nothing is queued for a lost server but probes.

    What was queued would reach the *next* server, which knows nothing of the context it was meant for.
    """
    send = seam.original

    @wraps(send)
    def submit(self: Any, operation: str, request_payloads: list[Any]) -> Any:
        seam.count()
        link = link_of(self)
        pointless = operation in LIMITED_BY or operation in QUIET
        if operation == "ping":
            return _ping(link, self, send, request_payloads)
        if operation in PROBES or not pointless:
            return _watched(send(self, operation, request_payloads), link, operation, request_payloads)
        epoch = link.epoch
        future = _failed(link, operation) if link.lost else send(self, operation, request_payloads)
        if link.epoch != epoch and link.lost:
            future.set_exception(_gone(link, operation))
        return _watched(future, link, operation, request_payloads)

    return submit


def _ping(link: Link, client: Any, send: Callable[..., Any], payloads: list[Any]) -> Any:
    """One ping at a time to a server that does not answer: more would fill the socket's queue and then block it."""
    future, sent_at = vars(client).get(_PING, (None, 0.0))
    recent = time.monotonic() - sent_at < _PING_AGAIN_AFTER_S
    if link.state is State.ANSWERING or future is None or future.query() or not recent:
        future = send(client, "ping", payloads)
        setattr(client, _PING, (future, time.monotonic()))
    return future


def _watched(future: Any, link: Link, operation: str, payloads: list[Any]) -> Any:
    seconds = first_limit_s(operation) if link.first(operation) else limit_s(operation)
    if seconds is not None:
        seconds += message_s(operation, payloads, link.token_bytes)
        # A silent server is still sent what releases its locks, but nothing waits for it.
        waits = link.state is State.ANSWERING or operation in PROBES
        setattr(future, _WATCH, Watch(link, operation, seconds if waits else 0.0))
    return future


def _gone(link: Link, operation: str) -> ServerUnavailableError:
    return ServerUnavailableError(f"LMCache server {link.url} is gone; {operation} has no answer")


def _failed(link: Link, operation: str) -> Any:
    from lmcache.v1.multiprocess.futures import MessagingFuture

    future: Any = MessagingFuture()
    future.set_exception(_gone(link, operation))
    return future


def cancel_streams(seam: Seam) -> Callable[..., Any]:
    """Called in the socket's own thread when the connection breaks (or the client closes): end everything pending."""
    cancel = seam.original

    @wraps(cancel)
    def end_all(self: Any) -> None:
        seam.count()
        link = link_of(self)
        link.disconnected()
        cancel(self)
        self.process_outbound_task()
        pending, self.pending_futures = self.pending_futures, {}
        # What was given up is counted already, and waits here for an answer all the same.
        lookups = sum(spec.operation in _LOOKUPS and not future.is_done_.is_set() for future, spec in pending.values())
        for future, spec in pending.values():
            future.set_exception(_gone(link, spec.operation))
        if lookups and not link.closing:
            tallies.miss("server_lost", "server", f"{link.url} is gone; prompts are computed", lookups)

    return end_all


def close(seam: Seam) -> Callable[..., Any]:
    """A connection that we close is not a server that we lost."""
    original = seam.original

    @wraps(original)
    def closing(self: Any) -> None:
        seam.count()
        link_of(self).closing = True
        original(self)

    return closing


def query(seam: Seam) -> Callable[..., Any]:
    """Done, or given up because it is overdue."""
    done = seam.original

    @wraps(done)
    def settled(self: Any) -> bool:
        seam.count()
        if done(self):
            return True
        watch: Watch | None = vars(self).get(_WATCH)
        return watch is not None and watch.left_s() == 0.0 and watch.give_up(self)

    return settled


def wait(seam: Seam) -> Callable[..., Any]:
    """Wait as long as the caller would, but not past the request's limit."""
    original = seam.original

    @wraps(original)
    def bounded(self: Any, timeout: float | None = None) -> bool:
        seam.count()
        watch: Watch | None = vars(self).get(_WATCH)
        if watch is None:
            return bool(original(self, timeout))
        left = watch.left_s()
        if timeout is not None and timeout < left:
            return bool(original(self, timeout))
        return original(self, left) or watch.give_up(self)

    return bounded
