"""Configurations of real models, as far as their sizes go, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["CONFIGS", "write"]

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "attention_bias": False, "mlp_bias": False, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None,
    "use_sliding_window": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "max_position_embeddings": 163840, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1, "norm_topk_prob": True, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
_DEEPSEEK_V3: dict[str, Any] = {
    **_DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "vocab_size": 129280, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
}  # fmt: skip
_FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-70b": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "llama-3.2-1b": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **_QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 32768, "vocab_size": 152064,
    },
    "qwen3-32b": {
        **_QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120,
        "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "qwen2-57b-a14b": {
        **_QWEN, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 32768, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": False,
    },
    "qwen3-235b-a22b": _QWEN3_MOE,
    "qwen3-235b-a22b-fp8": {
        **_QWEN3_MOE, "quantization_config": {
            **_FP8_BLOCKS,
            "modules_to_not_convert": ["lm_head", *(
                f"model.layers.{layer}.{name}" for layer in range(94)
                for name in ("input_layernorm", "mlp.gate", "post_attention_layernorm"))],
        },
    },
    "deepseek-v2-lite": {
        **_DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None, "vocab_size": 102400,
        "topk_method": "greedy", "scoring_func": "softmax", "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    "deepseek-v3-bf16": _DEEPSEEK_V3,
    "deepseek-v3": {**_DEEPSEEK_V3, "quantization_config": _FP8_BLOCKS},
    "deepseek-v3.2": {
        **_DEEPSEEK_V3, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
        "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64, "quantization_config": _FP8_BLOCKS,
    },
}  # fmt: skip
"""Configuration by a short name."""


def write(name: str, folder: Path) -> Path:
    """Write a configuration where a model's would lie, and return the model's folder."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(CONFIGS[name]))
    return place
