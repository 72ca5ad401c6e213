"""DP ranks as threads, each in its release's own ``EngineCore._initialize_kv_caches`` under the kv_budget patch.

Workers are what can't run here without loading a model: an executor tells what they measured, and notes what they are
told to allocate. Runs in an interpreter of its own. Four layers of one head of 32 in 16 bits, blocks of 32 tokens where
the configuration still says 16, as backends may choose them: 16384 bytes a block.
"""

from __future__ import annotations

import contextvars
import threading
from types import SimpleNamespace
from typing import Any

import torch

from patches.kv_budget import wrappers
from patches.kv_budget.agreement import Agreement
from patches.kv_budget.channel import Channel
from support.kv_budget_probe import splitting_twice
from support.simulated_ranks import hello, store
from support.tiny_config import tiny_config
from support.told_executor import told_executor

__all__ = ["outcomes"]

RANKS = [[100 * 16384, 95 * 16384], [91 * 16384, 90 * 16384 + 5]]
"""Two workers each; bytes of a block are 16384."""


def _executor(config: Any, memory: list[int]) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float16)
    return told_executor(
        config,
        memory,
        get_kv_cache_spec=[{f"layer.{number}": spec for number in range(4)} for _ in memory],
        get_supported_kv_cache_layouts=[["LBNHC"] for _ in memory],
    )


def _initialise(ranks: list[list[int]]) -> list[dict[str, Any]]:
    from vllm.v1.engine.core import EngineCore

    server = store()
    configs = [tiny_config(block_size=16) for _ in ranks]
    found: list[dict[str, Any]] = [{} for _ in ranks]

    def run(rank: int) -> None:
        config = configs[rank]
        config.parallel_config.data_parallel_rank = config.parallel_config.data_parallel_rank_local = rank
        config.parallel_config.data_parallel_size = len(ranks)
        agreement = Agreement(Channel(server.clone(), rank, len(ranks)), policy="align", ep_size=2, timeout_s=30)
        member = SimpleNamespace(agreement=agreement, watch=SimpleNamespace(stage=""))
        executor = _executor(config, ranks[rank])
        core = SimpleNamespace(model_executor=executor, collective_rpc=executor.collective_rpc)
        setattr(core, wrappers._MEMBER, member)
        try:
            agreement.hello(hello(rank))
            planned = EngineCore._initialize_kv_caches(core, config)
        except Exception as error:  # noqa: BLE001 - told as the rank's outcome
            found[rank] = {"error": f"{type(error).__name__}: {error}"}
            return
        found[rank] = {
            "scheduler": planned.num_blocks,
            "workers": executor.allocated,
            "cache_config": config.cache_config.num_gpu_blocks,
            "new ranks": core.available_gpu_memory_for_kv_cache,
            "tokens": [row["tokens"] for row in agreement.rows],
        }

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(run, rank)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def outcomes() -> dict[str, Any]:
    """What both ranks initialise, and what they would with a class that splits by DP twice."""
    sound = _initialise(RANKS)
    with splitting_twice():
        return {"sound": sound, "splitting twice": _initialise(RANKS)}
