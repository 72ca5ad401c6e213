"""vLLM's check of the KV cache, and its fitting of max_model_len, with the null block reserved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from patches.framework import process
from patches.framework.records import Seam
from patches.kv_null_block.pool import pool_of

__all__ = ["auto_fit_max_model_len", "check_enough_kv_cache_memory"]


def check_enough_kv_cache_memory(seam: Seam) -> Callable[..., None]:
    """Refuse what passes vLLM's own check only with the null block.

    Where memory is lacking altogether vLLM's words come first; the length they recommend leaves the null block out. The
    planner of an engine brings a worker's groups with its question; a helper of vLLM that no engine calls does not, and
    gets vLLM's answer.
    """
    check = seam.original

    @wraps(check)
    def check_usable(
        available_memory: int,
        get_needed_memory: Callable[[], int],
        max_model_len: int,
        estimate_max_model_len: Callable[[int], int],
    ) -> None:
        seam.count()
        if not isinstance(get_needed_memory, partial):
            check(available_memory, get_needed_memory, max_model_len, estimate_max_model_len)
            return
        vllm_config, groups = get_needed_memory.args
        pool = pool_of(vllm_config, groups, available_memory)
        check(
            available_memory,
            get_needed_memory,
            max_model_len,
            lambda memory: estimate_max_model_len(memory - pool.block),
        )
        refusal = pool.refusal(get_needed_memory(), max_model_len, estimate_max_model_len)
        if refusal is not None:
            process.refuse(refusal)

    return check_usable


def auto_fit_max_model_len(seam: Seam) -> Callable[..., None]:
    """Fit the length into what requests can use."""
    fit = seam.original

    @wraps(fit)
    def fit_usable(vllm_config: Any, projected_groups_per_worker: Any, available_memory: list[int]) -> None:
        seam.count()
        workers = zip(projected_groups_per_worker, available_memory, strict=True)
        usable = [pool_of(vllm_config, groups, memory).usable if groups else memory for groups, memory in workers]
        fit(vllm_config, projected_groups_per_worker, usable)

    return fit_usable
