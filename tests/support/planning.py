"""The KV cache planning of whatever release is in front, as its engine core calls it."""

from __future__ import annotations

from typing import Any

__all__ = ["kv_cache_configs", "module"]


def module() -> Any:
    """The module that plans; 0.33 moved it."""
    try:
        from vllm.v1.core import kv_cache_planning
    except ImportError:
        from vllm.v1.core import kv_cache_utils

        return kv_cache_utils
    return kv_cache_planning


def kv_cache_configs(config: Any, specs: list[dict[str, Any]], memory: list[int]) -> Any:
    """The plan of each worker of one engine; from 0.33 on the engine core groups the layers before."""
    planning = module()
    if not hasattr(planning, "get_global_kv_cache_groups"):
        return planning.get_kv_cache_configs(config, specs, memory)
    groups = planning.get_global_kv_cache_groups(config, specs)
    return planning.get_kv_cache_configs(config, specs, memory, groups)
