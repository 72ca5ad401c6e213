"""Whose plan it is, and who may apply it: the profile run holds collectives, so all of its ranks go the same way."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework.records import Seam

__all__ = ["apply_plan", "plan_fingerprint"]

logger = logging.getLogger(__name__)


def plan_fingerprint(seam: Seam) -> Callable[..., str]:
    """Make the data-parallel rank part of the key of 16 hexadecimal digits.

    The rank is ``data_parallel_index``, which the ranks of a dense model keep, although each is an engine of its own.
    """
    original = seam.original

    @wraps(original)
    def fingerprint(vllm_config: Any, rank: int, world_size: int) -> str:
        seam.count()
        key = f"{original(vllm_config, rank, world_size)} dp{vllm_config.parallel_config.data_parallel_index}"
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    return fingerprint


def apply_plan(seam: Seam) -> Callable[..., None]:
    """Apply a plan where every worker that profiles together has one that fits; else all of them measure.

    Within one engine the workers vote: they all come here, and the executor notices one that dies. Across DP ranks
    nothing watches a vote, and a mixture would hang the start; so with ``data_parallel_size`` above 1 all measure.
    """
    original = seam.original

    @wraps(original)
    def apply(worker: Any) -> None:
        seam.count()
        cache = worker.cache_config
        if not _enabled() or cache.kv_cache_memory_bytes is not None:
            return
        ranks: int = worker.parallel_config.data_parallel_size
        if ranks > 1:
            logger.warning(
                "VLLM_ENABLE_STARTUP_PLAN has no effect: %d data-parallel ranks profile together, and a rank that skips"
                " its part would hang the others. Set --kv-cache-memory-bytes instead, the same on all ranks.",
                ranks,
            )
            return
        original(worker)
        if not _everybody(cache.kv_cache_memory_bytes is not None, worker.parallel_config.world_size):
            cache.kv_cache_memory_bytes = None

    return apply


def _enabled() -> bool:
    import vllm.envs

    return bool(vllm.envs.VLLM_ENABLE_STARTUP_PLAN)


def _everybody(applies: bool, workers: int) -> bool:
    """Whether all workers of this engine apply a plan. One all-reduce of 4 bytes over the CPU group."""
    if workers == 1:
        return applies
    import torch
    from vllm.distributed.parallel_state import get_world_group

    vote = torch.tensor([applies], dtype=torch.int32)
    torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    everybody = bool(vote.item())
    if applies and not everybody:
        logger.warning("Startup plan not applied: another worker of this engine has none that fits its free memory.")
    return everybody
