"""What one client knows of its LMCache server: answering, silent, or lost; and who must be told.

*Lost* is proof: the connection broke, so the process at its other end is gone (or closed it), and nothing that was
asked over it will be answered. *Silent* is only a suspicion: an answer is overdue, so the server is stopped, stuck or
overloaded, and may still do later what it was asked. Pure Python; nothing of LMCache is imported here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

from patches.framework import tallies

__all__ = ["Link", "ServerUnavailableError", "State"]

logger = logging.getLogger(__name__)

SETTLED_AFTER_S = 5.0


class ServerUnavailableError(TimeoutError, ConnectionError):
    """The LMCache server is lost, or silent for longer than an engine may wait.

    A ``TimeoutError``, because that is what LMCache's own code treats as a miss.
    """


class State(Enum):
    """What is known of the server."""

    ANSWERING = "answering"
    SILENT = "silent"
    LOST = "lost"


class Link:
    """The state of one client's connection, and the health events that follow it.

    Attributes:
        url: Where the server is expected, for messages; empty until an adapter has said it.
        chunk_tokens: The chunk size that the server named at start; one that comes back with another is not used.
        block_tokens: The engine's block size, in tokens.
        token_bytes: KV bytes of a token that travel in messages; 0 where there are none or shared memory is used.
        epoch: Grows with every change of state.
        server: The server's attestation; None where it gave none, empty where it can't be read.
        fault: Why the server protects nothing, as it was last said; None where it does.
    """

    def __init__(self) -> None:
        self.url = ""
        self.block_tokens = 0
        self.chunk_tokens: int | None = None
        self.foreign_chunk_tokens: int | None = None
        self.token_bytes = 0.0
        self.server: dict[str, Any] | None = None
        self.fault: str | None = None
        self.epoch = 0
        self.state = State.ANSWERING
        self.closing = False
        self._asked: set[str] = set()
        self._changed_at = float("-inf")
        self._watchers: list[tuple[threading.Event, Callable[[], None]]] = []
        self._lock = threading.Lock()

    @property
    def in_service(self) -> bool:
        """Whether the engine has started with this server; before that, trouble is the start's to report."""
        return bool(self.url)

    @property
    def lost(self) -> bool:
        """Whether the server is proven gone."""
        return self.state is State.LOST

    def first(self, operation: str) -> bool:
        """Whether this is the first request of its kind; True once for each."""
        first = operation not in self._asked
        self._asked.add(operation)
        return first

    def takes_back(self, chunk_tokens: int) -> bool:
        """Whether a server with this chunk size may be used again; a misfit is logged once."""
        if self.chunk_tokens in (None, chunk_tokens):
            return True
        if self.foreign_chunk_tokens != chunk_tokens:
            self.foreign_chunk_tokens = chunk_tokens
            logger.error(
                "LMCache server %s came back with chunk size %d; this engine started with %d and goes on without it."
                " Restart the server with --chunk-size %d, or restart the engine.",
                self.url,
                chunk_tokens,
                self.chunk_tokens,
                self.chunk_tokens,
            )
        return False

    def settled(self) -> bool:
        """Whether the server answers and has done so for a while."""
        return self.state is State.ANSWERING and time.monotonic() - self._changed_at > SETTLED_AFTER_S

    def watch(self, health: threading.Event, wake: Callable[[], None]) -> None:
        """Clear ``health`` and call ``wake`` whenever the server stops answering (at once, if it has)."""
        self._watchers.append((health, wake))
        if self.state is not State.ANSWERING:
            health.clear()

    def disconnected(self) -> None:
        """The connection broke: the server is proven gone."""
        if not self.closing and self._enter(State.LOST) and self.in_service:
            tallies.add("lmcache_outages", "lost")
            logger.warning(
                "LMCache server %s is gone (connection lost). Requests go on without it: look-ups miss, loads are"
                " recomputed, stores are dropped. Caching resumes when it is back.",
                self.url,
            )

    def overdue(self, operation: str) -> None:
        """An answer to ``operation`` did not come in time."""
        if self._enter(State.SILENT) and self.in_service:
            tallies.add("lmcache_outages", "silent")
            logger.warning(
                "LMCache server %s did not answer %s in time. Requests go on without it until it answers again.",
                self.url,
                operation,
            )

    def answered(self) -> None:
        """The server answered: it is there."""
        if self._enter(State.ANSWERING) and self.in_service:
            tallies.add("lmcache_outages", "recovered")
            logger.warning("LMCache server %s answers again; caching resumes.", self.url)

    def _enter(self, state: State) -> bool:
        """Change state; False where there is nothing to change (a lost server can't be merely silent)."""
        with self._lock:
            if state is self.state or (state is State.SILENT and self.lost):
                return False
            self.state = state
            self.epoch += 1
            self._changed_at = time.monotonic()
        if state is not State.ANSWERING:
            self._alarm()
        return True

    def _alarm(self) -> None:
        for health, wake in self._watchers:
            health.clear()
            wake()
