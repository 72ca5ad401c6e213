"""What a release plans for a KV cache of some blocks. Runs in an interpreter that has that release in front.

Four layers of one head of 64 in 16 bits, blocks of 16 tokens: 16384 bytes a block.
"""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch

from support.patching import calls, patch_states, take_back

__all__ = ["planning"]

BLOCK = 16384
LAYERS = 4


def planning() -> dict[str, Any]:
    """Every scenario with the patches and, after these were taken back, as stock has it."""
    patched = _scenarios()
    states, counted = patch_states(), calls()
    take_back()
    return {
        "states": states,
        "calls": counted,
        "patched": patched,
        "stock": _scenarios(),
        "waiting": {count: _request_of_128_tokens(count) for count in (8, 9)},
        "bytes of a block": {kind: _block_bytes(kind, specs) for kind, specs in _models().items()} if counted else {},
    }


def _scenarios() -> dict[str, Any]:
    return {
        "7 blocks": _plan([7]),
        "8 blocks": _plan([8]),
        "9 blocks": _plan([9]),
        "nearly 9 blocks": _plan([9], less=1),
        "workers with 9 and 8": _plan([9, 8]),
        "nothing": _plan([0]),
        "override 8": _plan([100], override=8),
        "override 9": _plan([100], override=9),
        "override 4": _plan([100], override=4),
        "auto, 8 blocks": _plan([8], auto=True),
        "auto, 7 blocks": _plan([7], auto=True),
        "auto, 1 block": _plan([1], auto=True),
        "auto, 100 blocks": _plan([100], auto=True),
        "auto, override 8": _plan([100], auto=True, override=8),
        "auto, workers with 9 and 8": _plan([9, 8], auto=True),
    }


def _config(tokens: int, *, auto: bool = False, override: int | None = None) -> Any:
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig

    config = VllmConfig(
        cache_config=CacheConfig(block_size=16, num_gpu_blocks_override=override),
        device_config=DeviceConfig(device="cpu"),
    )
    config.model_config = SimpleNamespace(max_model_len=tokens, original_max_model_len=-1 if auto else tokens)
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    if hasattr(config.cache_config, "kv_cache_layout"):
        config.cache_config.kv_cache_layout = "NHD"
    return config


def _full(head_size: int) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=head_size, dtype=torch.float16)


def _plan(blocks: list[int], *, less: int = 0, auto: bool = False, override: int | None = None) -> dict[str, Any]:
    """Blocks, bytes and max_model_len of the plan, or the error; the model's own length is 128, with auto 4096."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    config = _config(4096 if auto else 128, auto=auto, override=override)
    specs = {f"layer.{index}": _full(64) for index in range(LAYERS)}
    try:
        planned = get_kv_cache_configs(config, [specs] * len(blocks), [count * BLOCK - less for count in blocks])
    except ValueError as error:
        return {"error": str(error), "kind": type(error).__name__}
    return {"blocks": [plan.num_blocks for plan in planned], "tokens": config.model_config.max_model_len}


def _request_of_128_tokens(blocks: int) -> dict[str, Any]:
    """What the release's own manager has free at start, and whether a request of 128 tokens gets its slots."""
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.request import Request

    config = _config(128)
    groups = get_kv_cache_groups(config, {f"layer.{index}": _full(64) for index in range(LAYERS)})
    planned = get_kv_cache_config_from_groups(config, groups, blocks * BLOCK)
    parameters = signature(KVCacheManager).parameters
    sizes = {name: 16 for name in ("scheduler_block_size", "hash_block_size") if name in parameters}
    manager = KVCacheManager(planned, max_model_len=128, enable_caching=False, **sizes)
    free = manager.block_pool.get_num_free_blocks()
    request = Request("long", [1] * 128, SamplingParams(max_tokens=1), None)
    return {"free": free, "given": manager.allocate_slots(request, 128) is not None}


def _models() -> dict[str, dict[str, Any]]:
    """Layers that vLLM groups in different ways; a connector may ask for packed blocks (from 0.23 on)."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16, sliding_window=64)
    mixed = {f"layer.{index}": window if index % 3 else _full(64) for index in range(9)}
    return {
        "one group": {f"layer.{index}": _full(64) for index in range(4)},
        "two head sizes": {f"layer.{index}": _full(64 if index % 2 else 128) for index in range(4)},
        "full and sliding": mixed,
        "packed": mixed,
    }


def _block_bytes(kind: str, specs: dict[str, Any]) -> dict[str, Any]:
    """Bytes of a block as the patch finds them, and as they follow from the sizes that vLLM plans."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

    from patches.kv_null_block.pool import pool_of

    config = _config(128, override=5)
    if kind == "packed":
        config.kv_transfer_config = SimpleNamespace(kv_connector_extra_config={"enable_cross_layers_blocks": "True"})
    groups = get_kv_cache_groups(config, specs)
    planned = get_kv_cache_config_from_groups(config, groups, 2**30)
    stride = getattr(planned.kv_cache_tensors[0], "block_stride", 0)
    pool = pool_of(config, groups, 2**30)
    return {
        "found": pool.block,
        "planned": stride or sum(tensor.size for tensor in planned.kv_cache_tensors) / planned.num_blocks,
        "packed": stride > 0,
        "capacity in blocks": pool.capacity / pool.block,
        "override afterwards": config.cache_config.num_gpu_blocks_override,
    }
