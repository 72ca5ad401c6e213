"""What the agreement needs to know of an engine, read from vLLM's own objects."""

from __future__ import annotations

import copy
import hashlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from patches.framework import process, roster, settings
from patches.framework.libraries import installed_version
from patches.kv_budget import shares
from patches.kv_budget.measurement import Hello, Measurement

__all__ = ["ep_size", "hello", "measure", "not_applicable"]


def not_applicable(vllm_config: Any, *, in_group: bool) -> str | None:
    """Why the ranks of this server have nothing to agree on, or None where they have."""
    from vllm import envs

    parallel = vllm_config.parallel_config
    if envs.VLLM_ELASTIC_EP_SCALE_UP_LAUNCH:
        return "elastic scale-up: the new rank takes the budget of the running ones"
    if parallel.distributed_executor_backend == "external_launcher":
        return "external_launcher: its executor already takes the least memory of all ranks"
    if in_group:
        return None
    if not vllm_config.model_config.is_moe:
        return "a dense model: each DP rank is an engine by itself"
    return "data_parallel_size=1: one engine"


def ep_size(parallel: Any) -> int:
    """Ranks over which experts are spread; 1 without expert parallelism."""
    if not parallel.enable_expert_parallel:
        return 1
    return int(parallel.data_parallel_size * parallel.tensor_parallel_size * parallel.prefill_context_parallel_size)


def _device(parallel: Any) -> str:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    first = parallel.data_parallel_rank_local * parallel.world_size
    last = first + parallel.world_size - 1
    return f"{current_platform.device_type}:{first}" + (f"-{last}" if last > first else "")


def hello(vllm_config: Any, lifeline: tuple[str, int]) -> Hello:
    """This rank's place and flags."""
    parallel = vllm_config.parallel_config
    return Hello(
        dp_rank=parallel.data_parallel_rank,
        host=socket.gethostname(),
        device=_device(parallel),
        lifeline=lifeline,
        flags=_flags(vllm_config),
    )


def _flags(vllm_config: Any) -> dict[str, Any]:
    cache, model = vllm_config.cache_config, vllm_config.model_config
    return {
        "SPLINT_KV_BUDGET": settings.get("SPLINT_KV_BUDGET"),
        "patch_set": roster.patch_set_digest(process.start().selection),
        "vllm": installed_version("vllm"),
        "max_model_len": model.original_max_model_len,
        "block_size": cache.block_size,
        "kv_cache_dtype": cache.cache_dtype,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "model": model.model,
        "max_num_batched_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": vllm_config.scheduler_config.max_num_seqs,
        **_cause(vllm_config),
    }


def _cause(vllm_config: Any) -> dict[str, Any]:
    from vllm import envs

    cache = vllm_config.cache_config
    return {
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "randomized_dummy_inputs": bool(envs.VLLM_RANDOMIZE_DP_DUMMY_INPUTS),
    }


def measure(
    vllm_config: Any, specs: list[dict[str, Any]], memory: list[int], groups: list[Any] | None = None
) -> Measurement:
    """What this rank measured, with the size of a block in each of its workers.

    Args:
        vllm_config: The engine's configuration.
        specs: The KV cache specification of each worker, layer by layer.
        memory: Bytes for the KV cache, one number a worker.
        groups: The layers as vLLM has grouped them already (from 0.33 on).
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    grouped, project, size = _grouping(vllm_config, specs) if groups is None else _grouped(vllm_config, groups)
    projected = [project(grouped, worker) for worker in specs]
    return Measurement(
        dp_rank=parallel.data_parallel_rank,
        host=socket.gethostname(),
        device=_device(parallel),
        memory=tuple(int(each) for each in memory),
        bytes_per_block=tuple(size(each) if each else 0 for each in projected),
        block_size=_block_size(grouped),
        override=cache.num_gpu_blocks_override,
        facts={"layout": str(cache.kv_cache_layout), "KV specification": _digest(specs)},
        cause=_cause(vllm_config)
        | {shares.SETTING: shares.share_of(parallel.data_parallel_rank, parallel.data_parallel_size)},
    )


def _digest(specs: list[dict[str, Any]]) -> str:
    text = repr([sorted((name, repr(spec)) for name, spec in worker.items()) for worker in specs])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _block_size(groups: list[Any]) -> int:
    """Tokens a block, as the engine core will set it: until the KV cache is planned the configuration may say another.

    Raises:
        ValueError: there is no group.
    """
    sizes = [group.kv_cache_spec.block_size for group in groups if group.kv_cache_spec.prefix_cacheable]
    return int(min(sizes or [group.kv_cache_spec.block_size for group in groups]))


_Grouping = tuple[list[Any], Callable[..., list[Any]], Callable[[list[Any]], int]]


def _grouping(vllm_config: Any, specs: list[dict[str, Any]]) -> _Grouping:
    """Up to 0.32 the planning groups the layers itself; here on copies, which it changes."""
    from vllm.v1.core import kv_cache_utils as planning

    merged = {name: spec for worker in specs for name, spec in worker.items()}
    groups = planning.get_kv_cache_groups(vllm_config, copy.deepcopy(merged))
    return groups, planning._project_kv_cache_groups_to_worker, partial(planning._pool_bytes_per_block, vllm_config)


def _grouped(vllm_config: Any, groups: list[Any]) -> _Grouping:
    """From 0.33 on the engine core has grouped them, and the platform's builder says what a block takes."""
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder

    builder = get_kv_cache_config_builder(vllm_config)
    size = partial(planning._pool_bytes_per_block_from_builder, builder, vllm_config)
    return groups, planning._project_kv_cache_groups_to_worker, size
