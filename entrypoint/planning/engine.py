"""From bytes to blocks with the installed vLLM's own code."""

from __future__ import annotations

import logging
import os
from dataclasses import fields
from typing import Any

from entrypoint.planning.cache import LayerCache
from patches.framework.errors import PlanError
from patches.framework.libraries import in_range, installed_version

__all__ = ["blocks", "release"]

Stage = list[LayerCache]
PLANNING = ">=0.19,<0.34"
"""Releases whose planning code was compared with the pure model."""


def release() -> str | None:
    """The installed release of vLLM where its planning is known, or None."""
    found = installed_version("vllm")
    return found if found is not None and in_range(found, PLANNING) else None


def blocks(
    stages: list[Stage], memory: list[int], *, block_size: int, max_model_len: int, override: int | None = None
) -> tuple[int, float]:
    """Blocks of one data-parallel rank, and how many sequences of full length they hold.

    Args:
        stages: The caches of each pipeline stage.
        memory: Bytes for the KV cache on a device of each stage.
        block_size: Tokens a block.
        max_model_len: Tokens of the longest sequence.
        override: ``--num-gpu-blocks-override``.

    Raises:
        PlanError: vLLM refuses, in its own words.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    from vllm.v1.core import kv_cache_utils

    config = _config(block_size, max_model_len, override)
    specs = [{cache.name: spec(cache, block_size) for cache in stage} for stage in stages]
    try:
        made = _configs(config, specs, memory)
    except ValueError as error:
        raise PlanError(
            f"vLLM {release()} refuses: {error}", "a KV cache for one sequence of full length", _LESS
        ) from None
    return made[0].num_blocks, kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, made[0])


_LESS = "Lower --max-model-len, use more devices, or a smaller --kv-cache-dtype."


def _configs(config: Any, specs: list[dict[str, Any]], memory: list[int]) -> Any:
    """vLLM's plan for each worker; 0.33 moved the function, and made it two."""
    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:
        from vllm.v1.core import kv_cache_utils

        return kv_cache_utils.get_kv_cache_configs(config, specs, memory)
    groups = planning.get_global_kv_cache_groups(config, specs)
    return planning.get_kv_cache_configs(config, specs, memory, groups)


def _config(block_size: int, max_model_len: int, override: int | None) -> Any:
    """vLLM's configuration as far as planning looks at it; the model itself is not needed."""
    from types import SimpleNamespace

    from vllm.config import CacheConfig, DeviceConfig, VllmConfig

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.cache_config = CacheConfig(block_size=block_size, num_gpu_blocks_override=override)
    if hasattr(config.cache_config, "kv_cache_layout"):
        config.cache_config.kv_cache_layout = "LBNHC"
    config.model_config = SimpleNamespace(
        max_model_len=max_model_len, original_max_model_len=max_model_len, supports_kv_cache_grouping=False
    )
    return config


def spec(cache: LayerCache, block_size: int) -> Any:
    """vLLM's own description of a cache, as the layer itself makes it in the installed release."""
    import torch
    from vllm.v1 import kv_cache_interface as interface

    known: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": cache.kv_heads,
        "head_size": cache.head_size,
        "dtype": getattr(torch, cache.dtype),
    }
    if cache.kind != "indexer" and hasattr(interface, "get_kv_quant_mode"):
        known["kv_quant_mode"] = interface.get_kv_quant_mode(cache.cache_dtype)
    if cache.kind == "full":
        return _made(interface.FullAttentionSpec, known)
    known["max_tp_shards"] = 1
    if cache.kind == "indexer":
        role = getattr(interface, "SparseCacheRole", None)
        return _made(interface.MLAAttentionSpec, known | ({"cache_role": role.INDEXER} if role else {}))
    packed = cache.token_bytes if cache.cache_dtype == "fp8_ds_mla" else None
    known |= {"cache_dtype_str": cache.cache_dtype, "state_content_bytes": packed}
    known["is_index_group_leader"] = cache.kind == "sparse_mla"
    return _made(interface.MLAAttentionSpec, known)


def _made(kind: type, known: dict[str, Any]) -> Any:
    """An instance with those of the values that the release's class has a field for."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in known.items() if name in names})
