"""What became of each transfer of a worker: tokens saved, stored and recomputed, counted once it has ended."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from patches.framework import tallies
from patches.lmcache_availability.connection import link_of
from patches.lmcache_availability.link import Link, ServerUnavailableError, State

__all__ = ["Results", "results_of"]

logger = logging.getLogger(__name__)

_ATTRIBUTE = "splint_results"
SAID_AFTER_S = 1.0


@dataclass
class Results:
    """The transfers of one worker that were not counted yet.

    All ranks of an engine move the same tokens, so rank 0 counts tokens; lost stores are counted by each.
    """

    link: Link
    first_rank: bool = True
    token_bytes: float = 0.0
    _stores: deque[tuple[Any, int]] = field(default_factory=deque)
    _loads: deque[tuple[Any, int]] = field(default_factory=deque)

    def store_sent(self, future: Any, tokens: int) -> None:
        """A store is on its way, or has ended already where the worker copies itself."""
        self._stores.append((future, tokens))
        self.collect()

    def load_sent(self, future: Any, tokens: int) -> None:
        """A load is on its way, or has ended already where the worker copies itself."""
        self._loads.append((future, tokens))
        self.collect()

    def store_lost(self, reason: str) -> None:
        """A store came to nothing."""
        tallies.add("lmcache_lost_stores", reason)

    def load_failed(self, tokens: int, detail: str) -> None:
        """A load came to nothing; its tokens are computed."""
        if self.first_rank:
            tallies.miss("load_failed", "server", detail)
            tallies.add("lmcache_recomputed_tokens", count=tokens)

    def collect(self) -> None:
        """Count what has ended since the last call. Linear in transfers under way."""
        for future, tokens in _ended(self._stores):
            self._store_ended(_answer(future), tokens)
        for future, tokens in _ended(self._loads):
            if not _answer(future):
                self.load_failed(tokens, "a load was not answered, or not with KV; its tokens are computed")
            elif self.first_rank:
                tallies.add("lmcache_saved_tokens", count=tokens)

    def await_reads(self, url: str) -> None:
        """Wait until no store reads the engine's blocks any more, for as long as that takes.

        Only where the server copies: such a store ends with its answer, or with the proof that the server is gone.
        """
        for future, _ in [*self._stores]:
            if not _settled(future) and _raw(future) is not future:
                _await(future, url)

    def _store_ended(self, answer: bool | None, tokens: int) -> None:
        if not answer:
            unavailable = answer is None or self.link.state is not State.ANSWERING
            self.store_lost("server_unavailable" if unavailable else "refused")
        elif self.first_rank:
            tallies.add("lmcache_stored_tokens", count=tokens)
            tallies.add("lmcache_stored_bytes", count=round(tokens * self.token_bytes))


def results_of(adapter: Any) -> Results:
    """The results of a worker adapter."""
    found: Results | None = vars(adapter).get(_ATTRIBUTE)
    if found is None:
        first = adapter.parallel_strategy.vllm_worker_id == 0
        found = vars(adapter).setdefault(_ATTRIBUTE, Results(link_of(adapter.req_client), first))
    if not found.token_bytes and adapter.kv_caches:
        found.token_bytes = _token_bytes(adapter)
    return found


def _token_bytes(adapter: Any) -> float:
    """KV bytes of a token on this rank, as LMCache stores them; 0 where layers come in groups of several formats."""
    if len(adapter.engine_group_infos) > 1:
        return 0.0
    import torch
    from lmcache.v1.multiprocess.transfer_context.base import compute_kv_layout

    _, layers, width, dtype, _, planes = compute_kv_layout(adapter.kv_caches, layout_hints=adapter._layout_hints)
    return float(planes * layers * width * getattr(torch, dtype).itemsize)


def _ended(transfers: deque[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Take out what has ended; the rest keeps its order."""
    ended: list[tuple[Any, int]] = []
    for _ in range(len(transfers)):
        transfer = transfers.popleft()
        (ended if _settled(transfer[0]) else transfers).append(transfer)
    return ended


def _raw(future: Any) -> Any:
    return getattr(future, "raw_future_", future)


def _settled(future: Any) -> bool:
    """Whether the answer is there, and with it, where a device copies, the end of the copy."""
    raw = _raw(future)
    return bool(raw.query()) and (raw.exception_ is not None or bool(future.query()))


def _await(future: Any, url: str) -> None:
    """Wait for the answer, and where a device copies for the end of the copy."""
    raw = _raw(future)
    while not raw.wait(SAID_AFTER_S):
        if tallies.due("preemption", 1):
            logger.warning(
                "The engine waits for LMCache server %s: it was to store blocks of requests that are preempted now, and"
                " may still read them, so nobody else may have them. Continue the server or kill it.",
                url,
            )
    if raw.exception_ is None:
        future.wait()


def _answer(future: Any) -> bool | None:
    """What the server said, or None where it said nothing any more.

    Raises:
        BaseException: what else ended the transfer, a fault of LMCache's own.
    """
    error = _raw(future).exception_
    if isinstance(error, ServerUnavailableError):
        return None
    return bool(future.result(timeout=0))
