"""What a release makes of one attention layer's KV cache. Runs in an interpreter that has that release in front.

The layer, its backend and both model runners' reshaping are the release's own; only what needs an accelerator (the
choice of a prefill kernel, the emptying of its cache) is left out.
"""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import torch

from support.patching import patch_states, take_back

__all__ = ["layouts"]

PREFIX = "model.layers.0.attn"
BLOCK_SIZE = 64
# The sizes of the reports: the largest batch of a captured CUDA graph, which the profile run allocates.
BLOCKS = (32, 128, 192, 512)


def layouts() -> dict[str, Any]:
    """Every layer's views with the patches and, after these were taken back, as stock has them."""
    layers = {
        "sparse fp8": mla_layer("fp8"),
        "sparse bf16": mla_layer("auto"),
        "dense fp8": dense_mla_layer("fp8"),
        "turboquant_4bit_nc": turboquant_layer("turboquant_4bit_nc"),
        "turboquant_k8v4": turboquant_layer("turboquant_k8v4"),
    }
    patched = {name: {blocks: views(*layer, blocks) for blocks in BLOCKS} for name, layer in layers.items()}
    states = patch_states()
    take_back()
    stock = {name: {blocks: views(*layer, blocks) for blocks in BLOCKS} for name, layer in layers.items()}
    return {"states": states, "patched": patched, "stock": stock}


def _config(cache_dtype: str) -> Any:
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig

    config = VllmConfig(
        cache_config=CacheConfig(block_size=BLOCK_SIZE, cache_dtype=cache_dtype),
        device_config=DeviceConfig(device="cpu"),
    )
    config.model_config = SimpleNamespace(
        max_model_len=128,
        dtype=torch.bfloat16,
        is_mm_prefix_lm=False,
        is_moe=False,
        hf_config=SimpleNamespace(model_type=""),
    )  # fmt: skip
    return config


def _mla(cache_dtype: str, backend: Any, **options: Any) -> tuple[Any, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import mla_attention

    mla_attention.get_mla_prefill_backend = lambda *_: lambda **_: None
    config = _config(cache_dtype)
    with set_current_vllm_config(config):
        _be_one_rank()
        layer = mla_attention.MLAAttention(
            num_heads=16, scale=1.0, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=512,
            kv_lora_rank=512, kv_b_proj=torch.nn.Linear(1, 1), cache_config=config.cache_config, prefix=PREFIX,
            attn_backend=backend, **options,
        )  # fmt: skip
    return config, layer


def _be_one_rank() -> None:
    """Tensor parallelism of one, which the layers ask for from 0.27 on."""
    from vllm import distributed

    if not torch.distributed.is_initialized():
        rendezvous = f"file://{tempfile.mkdtemp()}/store"
        distributed.init_distributed_environment(1, 0, rendezvous, 0, "gloo")
        distributed.initialize_model_parallel(1)


def mla_layer(cache_dtype: str) -> tuple[Any, Any]:
    """A configuration and a DeepSeek V3.2 attention layer (latent 512, rope 64) on the FlashMLA sparse backend."""
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
    from vllm.v1.worker.workspace import init_workspace_manager

    torch.set_default_dtype(torch.bfloat16)
    torch.accelerator.empty_cache = lambda: None
    init_workspace_manager(torch.device("cpu"))
    indices = torch.zeros(1, dtype=torch.int32)
    return _mla(cache_dtype, FlashMLASparseBackend, use_sparse=True, topk_indices_buffer=indices)


def dense_mla_layer(cache_dtype: str) -> tuple[Any, Any]:
    """The same with the dense Triton backend, whose FP8 cache keeps the plain layout."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

    current_platform.num_compute_units = lambda *_: 1
    torch.set_default_dtype(torch.bfloat16)
    return _mla(cache_dtype, TritonMLABackend)


def turboquant_layer(cache_dtype: str) -> tuple[Any, Any]:
    """A configuration and a layer of 8 heads, 2 KV heads of 128, on the TurboQuant backend."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend

    torch.set_default_dtype(torch.bfloat16)
    config = _config(cache_dtype)
    with set_current_vllm_config(config):
        layer = Attention(
            num_heads=8, head_size=128, scale=1.0, num_kv_heads=2, cache_config=config.cache_config, prefix=PREFIX,
            attn_backend=TurboQuantAttentionBackend,
        )  # fmt: skip
    return config, layer


def views(config: Any, layer: Any, blocks: int) -> dict[str, Any]:
    """The layer's page in bytes, its spec, and the shape that each runner gives a cache of ``blocks`` blocks.

    In place of a shape stands the error that ended the attempt.
    """
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.worker.utils import AttentionGroup

    spec = layer.get_kv_cache_spec(config)
    config.cache_config.num_gpu_blocks_override = blocks
    groups = get_kv_cache_groups(config, {PREFIX: spec})
    planned = get_kv_cache_config_from_groups(config, groups, available_memory=0)
    attention = [[AttentionGroup(layer.attn_backend, [PREFIX], spec, 0)]]
    return {
        "page": spec.page_size_bytes,
        "spec": repr(spec),
        "mode": spec.kv_quant_mode.name,
        "V1": _outcome(_first_runner, config, planned, attention, layer),
        "V2": _outcome(_second_runner, config, planned, attention, layer),
    }


def _outcome(view: Any, *arguments: Any) -> list[int] | str:
    try:
        return list(view(*arguments)[PREFIX].shape)
    except (RuntimeError, ValueError) as error:
        return str(error)


def _first_runner(config: Any, planned: Any, attention: Any, layer: Any) -> Any:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = object.__new__(GPUModelRunner)
    vars(runner).update(
        vllm_config=config, cache_config=config.cache_config, kv_cache_config=planned, attn_groups=attention,
        runner_only_attn_layers=set(), device=torch.device("cpu"), shared_kv_cache_layers={}, kv_caches=[],
        compilation_config=SimpleNamespace(static_forward_context={PREFIX: layer}),
        model_config=config.model_config,
    )  # fmt: skip
    return runner.initialize_kv_cache_tensors(planned, [BLOCK_SIZE])


def _second_runner(config: Any, planned: Any, attention: Any, layer: Any) -> Any:
    from vllm.v1.worker.gpu.attn_utils import init_kv_cache

    dtype = config.cache_config.cache_dtype
    return init_kv_cache([], {PREFIX: layer}, planned, attention, torch.device("cpu"), dtype, [BLOCK_SIZE], config)
