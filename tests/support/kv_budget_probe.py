"""DP ranks as threads around one store, each planning with vLLM's real code under the kv_budget patch.

Runs in an interpreter of its own. Four layers of one head of 64 in 16 bits, blocks of 16 tokens: 16384 bytes a block;
with two pipeline stages the first worker has three of the layers.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from patches.kv_budget import wrappers
from patches.kv_budget.agreement import Agreement
from patches.kv_budget.budget import KVCacheBudget, build_block_table
from patches.kv_budget.channel import Channel
from support.planning import kv_cache_configs
from support.simulated_ranks import hello, store

__all__ = ["plan", "plan_alone", "splitting_twice", "tables"]


@contextmanager
def splitting_twice() -> Iterator[None]:
    """The budget as it must not be: what one DP rank has is split by DP once more."""
    with patch.object(
        KVCacheBudget, "per_dp_blocks", property(lambda self: self.num_blocks_global // self.dp_size // self.dp_size)
    ):
        yield


def _config(rank: int, size: int, max_model_len: int, *, auto: bool, override: int | None) -> Any:
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig

    cache = CacheConfig(block_size=16, num_gpu_blocks_override=override)
    config = VllmConfig(cache_config=cache, device_config=DeviceConfig(device="cpu"))
    parallel = config.parallel_config
    parallel.data_parallel_rank = parallel.data_parallel_rank_local = parallel.data_parallel_index = rank
    parallel.data_parallel_size = parallel.data_parallel_size_local = size
    original = -1 if auto else max_model_len
    config.model_config = SimpleNamespace(
        max_model_len=max_model_len, original_max_model_len=original, supports_kv_cache_grouping=False
    )
    config.cache_config.kv_cache_layout = "NHD"
    return config


def _specs(stages: int) -> list[dict[str, Any]]:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16)
    layers = {f"layer.{number}": spec for number in range(4)}
    if stages == 1:
        return [layers]
    return [{name: layers[name] for name in list(layers)[:3]}, {"layer.3": spec}]


def plan_alone(memory: list[int]) -> dict[str, list[int]]:
    """Blocks a worker of one engine that is in no group, with the patch and after it was taken back."""
    from support.patching import take_back

    def blocks() -> list[int]:
        config = _config(0, 1, 128, auto=False, override=None)
        planned = kv_cache_configs(config, _specs(1) * len(memory), list(memory))
        return [each.num_blocks for each in planned]

    patched = blocks()
    take_back()
    return {"patched": patched, "stock": blocks()}


def tables(blocks: int, max_model_len: int) -> dict[str, Any]:
    """The budget's block table and a worker's own for as many requests: shape, dtype, what is in it."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.worker.block_table import BlockTable

    config = _config(0, 2, max_model_len, auto=False, override=None)
    columns = _specs(1)[0]["layer.0"].max_num_blocks_per_req(config, max_model_len)
    own = build_block_table(KVCacheBudget(2 * blocks, 2, 1, 16), columns)
    worker = BlockTable(16, blocks, columns, 128, False, torch.device("cpu"), 1).block_table.np
    null = BlockPool(num_gpu_blocks=blocks, enable_caching=False, hash_block_size=16).null_block.block_id
    return {
        "own": [list(own.shape), str(own.dtype), int(own.min()), int(own.max())],
        "worker": [list(worker.shape), str(worker.dtype), null, null],
    }


def plan(
    ranks: list[list[int]], *, policy: str = "align", max_model_len: int = 128, auto: bool = False,
    override: int | None = None, pp: int = 1,
) -> list[dict[str, Any]]:  # fmt: skip
    """What each rank plans from its measured bytes (one number a worker), or why it refuses."""
    server = store()
    found: list[dict[str, Any]] = [{} for _ in ranks]

    def run(rank: int, memory: list[int]) -> None:
        config = _config(rank, len(ranks), max_model_len, auto=auto, override=override)
        agreement = Agreement(Channel(server.clone(), rank, len(ranks)), policy=policy, ep_size=1, timeout_s=30)
        wrappers._planning.set(SimpleNamespace(agreement=agreement, watch=SimpleNamespace(stage="")))  # type: ignore[arg-type]
        specs = _specs(pp) if pp > 1 else _specs(1) * len(memory)
        try:
            agreement.hello(hello(rank))
            configs = kv_cache_configs(config, specs, list(memory))
        except (ValueError, RuntimeError, Exception) as error:  # noqa: BLE001 - told as the rank's outcome
            found[rank] = {"error": f"{type(error).__name__}: {error}"}
            return
        found[rank] = {
            "blocks": {plan.num_blocks for plan in configs},
            "bytes": [sum(tensor.size for tensor in plan.kv_cache_tensors) for plan in configs],
            "max_model_len": config.model_config.max_model_len,
        }
        found[rank]["blocks"] = sorted(found[rank]["blocks"])

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, rank, memory))
        for rank, memory in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
