"""What the installed vLLM makes of real models' configurations: its own model classes on torch's meta device.

``python -m support.plan_on_vllm FOLDER [quick]`` prints JSON, one entry a case. The process groups are torch's
fake ones, so that one process stands for any rank of any deployment; nothing is allocated and nothing is sent.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

from support.model_configs import CONFIGS, write

__all__ = ["CASES", "QUICK", "Case", "blocks", "main"]

Case = tuple[str, int, int, int, bool, int]
"""Model, TP, PP, DP, expert parallelism, and the rank that is looked at."""

DENSE = ("llama-3.1-70b", "llama-3.2-1b", "qwen2.5-7b", "qwen3-32b")
SPARSE = ("mixtral-8x7b", "qwen2-57b-a14b", "qwen3-235b-a22b", "deepseek-v2-lite", "deepseek-v3-bf16")
FP8 = ("qwen3-235b-a22b-fp8", "deepseek-v3")
_DENSE_SPLITS = ((1, 1, 1, 0), (2, 1, 1, 1), (4, 2, 1, 0), (4, 2, 1, 5), (1, 3, 1, 1), (1, 3, 1, 2))
_SPARSE_SPLITS = (
    (1, 1, 1, False, 0), (2, 1, 1, False, 1), (4, 1, 2, True, 5), (1, 1, 8, True, 0), (2, 2, 2, True, 0),
    (2, 2, 2, True, 2), (2, 1, 2, False, 3),
)  # fmt: skip
CASES: tuple[Case, ...] = (
    *((model, tp, pp, dp, False, rank) for model in DENSE for tp, pp, dp, rank in _DENSE_SPLITS),
    *((model, *split) for model in (*SPARSE, *FP8) for split in _SPARSE_SPLITS),
    ("mixtral-8x7b", 1, 1, 3, True, 0),
)
QUICK: frozenset[Case] = frozenset(
    case for case in CASES if case[1:] in ((1, 1, 1, False, 0), (4, 2, 1, False, 5), (2, 2, 2, True, 2))
)
"""What ``make test`` looks at: each model alone, and with all kinds of parallelism at once."""


def _replace_what_needs_other_processes() -> None:
    """Fake groups everywhere; no shared memory, no message queues; FP8 kernels that this CPU lacks count as there."""
    import torch.distributed as dist
    import vllm.distributed.parallel_state as state
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    new_group, model_group = dist.new_group, state.init_model_parallel_group
    dist.new_group = lambda *given, **named: new_group(*given, **{**named, "backend": "fake"})
    state.init_model_parallel_group = lambda *given, **named: model_group(
        *given, **{**named, "use_message_queue_broadcaster": False}
    )
    state.in_the_same_node_as = lambda group, *_, **__: [True] * dist.get_world_size(group)
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False
    CPUFp8BlockScaledMMKernel.is_supported = staticmethod(lambda *_: (True, None))
    ExpertMapManager.get_compressed_map_string = lambda _: "on the meta device"


def _config(folder: Path, model: str, tp: int, pp: int, dp: int, expert_parallel: bool) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(write(model, folder)), skip_tokenizer_init=True, tensor_parallel_size=tp, pipeline_parallel_size=pp,
        data_parallel_size=dp, enable_expert_parallel=expert_parallel, load_format="dummy", enforce_eager=True,
    ).create_engine_config()  # fmt: skip


def _look(folder: Path, case: Case) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import vllm.distributed.parallel_state as state
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    model, tp, pp, dp, expert_parallel, rank = case
    config = _config(folder, model, tp, pp, dp, expert_parallel)
    dist.init_process_group("fake", rank=rank, world_size=tp * pp * dp, store=FakeStore())
    try:
        with set_current_vllm_config(config):
            state.init_distributed_environment(tp * pp * dp, rank, "fake://", rank, "fake")
            state.initialize_model_parallel(tp, pp)
            torch.set_default_dtype(torch.bfloat16)
            with torch.device("meta"):
                built = initialize_model(config)
    finally:
        state.destroy_model_parallel()
        state.destroy_distributed_environment()
        torch.set_default_dtype(torch.float32)
    scales = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")  # of the KV cache, gone once weights are loaded
    weights = {name: value.nbytes for name, value in built.named_parameters() if not name.endswith(scales)}
    return {
        "case": case,
        "weights": sum(weights.values()),
        "max_model_len": config.model_config.max_model_len,
        "specs": _specs(config, model, tp),
        "caches": sorted(
            name
            for name, layer in config.compilation_config.static_forward_context.items()
            if hasattr(layer, "get_kv_cache_spec")
        ),
    }


def _saved(folder: Path) -> dict[str, bool]:
    """By model, whether its configuration reads the same once Transformers has saved it in its own way."""
    from transformers import AutoConfig

    from entrypoint.planning import architectures

    found = {}
    for model, config in CONFIGS.items():
        saved = json.loads(AutoConfig.from_pretrained(write(model, folder)).to_json_string())
        found[model] = architectures.shape(saved) == architectures.shape(config)
    return found


def _specs(config: Any, model: str, tp: int) -> dict[str, bool]:
    """By KV dtype, whether the real layers describe their caches as the plan does."""
    from entrypoint.planning import architectures, engine
    from entrypoint.planning.cache import layer_caches
    from entrypoint.planning.split import Split

    shape = architectures.shape(CONFIGS[model])
    layers = {
        name: layer
        for name, layer in config.compilation_config.static_forward_context.items()
        if hasattr(layer, "get_kv_cache_spec")
    }
    (name, layer), *_ = layers.items()
    equal = {}
    for kv_dtype in ("auto", "fp8") if "deepseek" in model else ("auto", "fp8", "fp8_e5m2"):
        _pretend(layer, kv_dtype)
        number = int(name.split(".")[2])
        (planned,) = layer_caches(shape, Split(tp), range(number, number + 1), "bfloat16", kv_dtype)
        equal[kv_dtype] = layer.get_kv_cache_spec(config) == engine.spec(planned, config.cache_config.block_size)
    return equal


def _pretend(layer: Any, kv_dtype: str) -> None:
    """The layer as it would be with another KV dtype, which the CPU's attention may not have."""
    import torch
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    layer.kv_cache_dtype = kv_dtype
    if hasattr(layer, "kv_cache_torch_dtype") and kv_dtype != "auto":
        layer.kv_cache_torch_dtype = kv_cache_dtype_str_to_dtype(kv_dtype, None)
        assert layer.kv_cache_torch_dtype == torch.uint8


def _sparse_attention() -> dict[str, Any]:
    """DeepSeek-V3.2: the layer's classes refuse the CPU, so their descriptions are asked for without their kernels."""
    from types import SimpleNamespace

    from vllm.config import CacheConfig
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    from entrypoint.planning import architectures, engine
    from entrypoint.planning.cache import layer_caches
    from entrypoint.planning.split import Split

    shape = architectures.shape(CONFIGS["deepseek-v3.2"])
    latent, index = layer_caches(shape, Split(), range(1), "bfloat16", "fp8_ds_mla")
    cache = CacheConfig(block_size=64)
    given = SimpleNamespace(cache_config=cache, model_config=None)
    layer = SimpleNamespace(
        kv_cache_dtype="fp8_ds_mla", head_size=576, sliding_window=None, indexer=object(),
        non_causal_multi_token_decode=False,
    )  # fmt: skip
    import torch

    indexer = SimpleNamespace(cache_config=cache, head_dim=132, dtype=torch.uint8)
    return {
        "latent": MLAAttention.get_kv_cache_spec(layer, given) == engine.spec(latent, 64),
        "index": DeepseekV32IndexerCache.get_kv_cache_spec(indexer, given) == engine.spec(index, 64),
        "bytes": [latent.token_bytes, index.token_bytes],
    }


BLOCKS_OF = (
    ("llama-3.1-70b", "auto"), ("qwen3-235b-a22b", "fp8"), ("deepseek-v3", "auto"), ("deepseek-v3", "fp8"),
    ("deepseek-v3.2", "fp8_ds_mla"), ("deepseek-v3.2", "auto"),
)  # fmt: skip


def blocks() -> list[tuple[bool, bool, int]]:
    """Whether vLLM's blocks and concurrency are the pure model's, over stages and bytes that do not divide."""
    from entrypoint.planning import architectures, engine
    from entrypoint.planning.cache import layer_caches
    from entrypoint.planning.split import Split

    found = []
    for (model, kv_dtype), (pp, block, spare) in product(BLOCKS_OF, ((1, 16, 0), (2, 64, 1), (3, 64, -1))):
        shape = architectures.shape(CONFIGS[model])
        split = Split(2, pp)
        stages = [layer_caches(shape, split, layers, "bfloat16", kv_dtype) for layers in split.stages(shape.layers)]
        sizes = [block * sum(cache.token_bytes for cache in stage) for stage in stages]
        memory = [1000 * size + 977 * place + spare for place, size in enumerate(sizes)]
        pure = min(given // size for given, size in zip(memory, sizes, strict=True))
        made, concurrency = engine.blocks(stages, memory, block_size=block, max_model_len=4096)
        found.append((made == pure, concurrency == pure / (4096 // block), pure))
    return found


def main() -> None:
    """Print what vLLM says."""
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    _replace_what_needs_other_processes()
    from vllm.distributed.utils import get_pp_indices

    folder = Path(sys.argv[1])
    cases = [case for case in CASES if case in QUICK] if sys.argv[2:] == ["quick"] else CASES
    sizes = [(layers, pp) for layers in (2, 28, 61, 94) for pp in (1, 2, 3, 4, 6) if pp <= layers]
    stages = [(layers, pp, [get_pp_indices(layers, rank, pp) for rank in range(pp)]) for layers, pp in sizes]
    said = {"saved": _saved(folder), "cases": [_look(folder, case) for case in cases], "stages": stages}
    print(json.dumps(said | {"sparse": _sparse_attention(), "blocks": blocks()}))


if __name__ == "__main__":
    main()
