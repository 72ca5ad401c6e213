"""A release's own configuration of a small mixture-of-experts model on CPU. For probes that run in its interpreter."""

from __future__ import annotations

import json
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["EXPERTS", "HIDDEN", "REQUEST_TOKENS", "VOCABULARY", "tiny_config"]

EXPERTS = 8
HIDDEN = 64
VOCABULARY = 512
REQUEST_TOKENS = 128

_MODEL = {
    "model_type": "qwen3_moe", "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": EXPERTS, "num_experts_per_tok": 1,
    "moe_intermediate_size": 32, "intermediate_size": 64, "vocab_size": VOCABULARY,
    "max_position_embeddings": REQUEST_TOKENS, "torch_dtype": "float32",
}  # fmt: skip


def tiny_config(model: type | None = None, **arguments: Any) -> Any:
    """``VllmConfig`` as the engine makes it.

    Args:
        model: A model class instead of Qwen3-MoE.
        arguments: What ``EngineArgs`` takes.
    """
    _take_cpu_platform()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry

    if model is not None:
        ModelRegistry.register_model(model.__name__, model)
    name = "Qwen3MoeForCausalLM" if model is None else model.__name__
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps({"architectures": [name], **_MODEL}))
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, dtype="float32",
        max_model_len=REQUEST_TOKENS, **arguments,
    ).create_engine_config()  # fmt: skip
    if getattr(config.cache_config, "kv_cache_layout", "") is None:
        config.cache_config.kv_cache_layout = "LBNHC"  # what the engine core resolves it to on CPU, since 0.29
    return config


def _take_cpu_platform() -> None:
    """Up to 0.27 the platform is read from the version's "+cpu", which unpacked sources lack."""
    told = metadata.version

    def version(distribution_name: str) -> str:
        found = told(distribution_name)
        return f"{found.partition('+')[0]}+cpu" if distribution_name == "vllm" else found

    metadata.version = version
    from vllm.platforms import current_platform

    metadata.version = told
    if not current_platform.is_cpu():
        raise RuntimeError(f"{current_platform} was taken before the configuration was made")
