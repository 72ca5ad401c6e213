"""The block pool of one worker, in bytes and blocks, without the block that vLLM keeps for itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from patches.framework.errors import RefusedError

__all__ = ["PoolTooSmallError", "WorkerPool", "pool_of"]

# Large enough that dividing it by the blocks it makes gives the bytes of one block exactly.
_ENDLESS_BYTES = 2**90


class PoolTooSmallError(RefusedError, ValueError):
    """No request of max_model_len tokens fits beside the null block. A ValueError, as vLLM's own check raises."""


@dataclass(frozen=True)
class WorkerPool:
    """What a worker's memory for the KV cache is worth.

    Attributes:
        capacity: Bytes that will be allocated, or less than one block more.
        block: Bytes of one block over all layers of the worker.
    """

    capacity: int
    block: int

    @property
    def usable(self) -> int:
        """Bytes for requests: without the null block, which vLLM's pool never hands out."""
        return self.capacity - self.block

    def refusal(self, needed: int, tokens: int, estimate: Callable[[int], int]) -> PoolTooSmallError | None:
        """Why a request does not fit, or None where it does.

        Args:
            needed: Bytes that a request of ``tokens`` tokens needs.
            tokens: The model's max_model_len.
            estimate: Tokens of the longest request that fits into so many bytes; 0 where none does.
        """
        if needed <= self.usable:
            return None
        blocks, longest = -(-needed // self.block), estimate(self.usable)
        return PoolTooSmallError(
            f"the KV cache has {self.capacity // self.block} blocks of {self.block} bytes, a request of max_model_len"
            f" ({tokens} tokens) needs {blocks}, and vLLM never hands out the first one (the null block):"
            f" such a request would wait for ever",
            f"at least {blocks + 1} blocks, {(blocks + 1) * self.block} bytes",
            (f"Set --max-model-len {longest} or less, or give" if longest else "Give")
            + " the cache more room (--gpu-memory-utilization, --kv-cache-memory-bytes, --num-gpu-blocks-override).",
        )


def pool_of(vllm_config: Any, groups: Any, available: int) -> WorkerPool:
    """The pool that vLLM makes of ``available`` bytes for a worker's KV-cache groups.

    ``num_gpu_blocks_override`` decides alone where it is set. The bytes of one block are asked of vLLM's own planner,
    whatever the layout: which function knows them, and whether one does, differs between releases.
    """
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

    cache = vllm_config.cache_config
    override = cache.num_gpu_blocks_override
    cache.num_gpu_blocks_override = None
    try:
        planned = get_kv_cache_config_from_groups(vllm_config, groups, _ENDLESS_BYTES)
    finally:
        cache.num_gpu_blocks_override = override
    block = _ENDLESS_BYTES // planned.num_blocks
    return WorkerPool(available if override is None else override * block, block)
