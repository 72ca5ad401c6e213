"""Free blocks of an engine's pool, taken while nothing runs and given back, zeroed, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from patches.framework.errors import ProbeError

__all__ = ["Groups", "borrowed", "spans"]

Groups = list[list[int]]
"""Block numbers by KV cache group, in the order of their tokens."""


def spans(kv_cache_config: Any) -> list[int]:
    """Tokens of one block in each KV cache group; 0 for groups that keep no pages of their own on the device.

    Args:
        kv_cache_config: vLLM's ``KVCacheConfig`` of scheduler or worker.
    """
    return [_span(group) for group in kv_cache_config.kv_cache_groups]


def _span(group: Any) -> int:
    spec = group.kv_cache_spec
    if group.host_resident or not spec.has_layer_views:
        return 0
    return int(spec.block_size)


@contextmanager
def borrowed(engine: Any, counts: Sequence[int], wipe: Callable[[Groups], None]) -> Iterator[Groups]:
    """Hold ``counts[group]`` free blocks of each group during the block; no two groups share one.

    Args:
        engine: vLLM's ``EngineCore``, between two steps and without requests.
        counts: Blocks of each KV cache group.
        wipe: Zeroes blocks before they go back: kernels may read behind the last token of a block, and what they
            find there must not be NaN.

    Raises:
        ProbeError: too few blocks are free.
    """
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    if free < sum(counts):
        raise ProbeError(
            f"{free} free KV blocks",
            f"{sum(counts)}, for {len(counts)} groups",
            "Give the KV cache more memory (--gpu-memory-utilization, --kv-cache-memory-bytes).",
        )
    blocks = pool.get_new_blocks(sum(counts))
    ids = iter([block.block_id for block in blocks])
    groups = [[next(ids) for _ in range(count)] for count in counts]
    try:
        yield groups
    finally:
        try:
            wipe(groups)
        finally:
            pool.free_blocks(blocks)
