"""How long each request to the LMCache server may take before the engine goes on without it."""

from __future__ import annotations

from functools import cache
from typing import Any

from patches.framework import settings

__all__ = [
    "LIMITED_BY",
    "PROBES",
    "QUIET",
    "first_limit_s",
    "limit_s",
    "message_s",
    "ping_limit_s",
    "prefetch_limit_s",
    "start_limit_s",
]

_START = "SPLINT_LMCACHE_START_TIMEOUT_S"
_LOOKUP = "SPLINT_LMCACHE_LOOKUP_TIMEOUT_S"
_PREFETCH = "SPLINT_LMCACHE_PREFETCH_TIMEOUT_S"
_TRANSFER = "SPLINT_LMCACHE_TRANSFER_TIMEOUT_S"

_STORES = frozenset({"prepare_store", "commit_store"})

LIMITED_BY = {
    "lookup": _LOOKUP,
    "query_prefetch_status": _LOOKUP,
    "clear": _LOOKUP,
    "unregister_kv_cache": _LOOKUP,
    "unregister_kv_cache_engine_driven_context": _LOOKUP,
    "prepare_store": _TRANSFER,
    "commit_store": _TRANSFER,
    "prepare_retrieve": _TRANSFER,
    "commit_retrieve": _TRANSFER,
    "get_chunk_size": _START,
    "get_experimental": _START,
}
"""The setting that limits each operation on which something waits.

``store`` and ``retrieve`` are missing on purpose: there the *server* reads and writes the engine's blocks, so giving
up early would free blocks that it may still touch. They end with its answer or with the proof that it is gone.
Registration may take long with a large cache and is judged by the order of answers instead of by time.
"""

QUIET = frozenset({"free_lookup_locks", "end_session", "report_block_allocation", "store", "retrieve", "store_q"})
"""Operations without a limit that are pointless once the server is lost."""

MESSAGE_BYTES_PER_S = 64 << 20
"""A pace that a live server keeps on a busy machine: pickling, loopback and copy together reached 190 MB/s on two
busy cores (``bench/lmcache_path.py messages``), and loads of 64 MiB were given up at a limit of 256 MiB/s."""

PROBES = frozenset({"ping", "get_chunk_size", "get_experimental"})
"""Operations that are sent to a lost server all the same: they find out whether it is back."""


@cache
def limit_s(operation: str) -> float | None:
    """Seconds that an answer to ``operation`` may take, or None where it may take any time."""
    name = LIMITED_BY.get(operation)
    return None if name is None else float(settings.get(name))


def first_limit_s(operation: str) -> float | None:
    """The same for an engine's first request of this kind.

    In the first store a fresh server touches its memory for the first time, which took 0.6 s here on two busy cores.
    The smoke tests make that store, so no client waits for it; a server that is late with it is good.
    """
    limit = limit_s(operation)
    return max(limit, start_limit_s()) if limit is not None and operation in _STORES else limit


def message_s(operation: str, payloads: list[Any], token_bytes: float) -> float:
    """Seconds that the bytes of a transfer may take on their way, beyond the limit of its operation.

    Args:
        operation: The request's name.
        payloads: Its arguments; a store carries its bytes, a load names the tokens whose bytes the answer carries.
        token_bytes: KV bytes of one token in the answer to a load; 0 where they travel through shared memory.
    """
    if operation == "commit_store":
        size = float(len(payloads[2]))
    elif operation == "prepare_retrieve":
        size = (payloads[0].end - payloads[0].start) * token_bytes
    else:
        size = 0.0
    return size / MESSAGE_BYTES_PER_S


def ping_limit_s() -> float:
    """Seconds after which an unanswered ping means a silent server."""
    return float(settings.get(_LOOKUP))


def prefetch_limit_s() -> float:
    """Seconds that a server which answers may take over one look-up, second level and all."""
    return float(settings.get(_PREFETCH))


def start_limit_s() -> float:
    """Seconds that a starting engine waits for the server's first answer."""
    return float(settings.get(_START))
