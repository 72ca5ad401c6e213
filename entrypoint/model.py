"""A model's shape as its ``config.json`` tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patches.framework import checkpoint

__all__ = ["Model"]

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
# What only models say that keep a state (Mamba, GDN, convolutions) in some layers.
_STATE = (
    "full_attention_interval",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_num_key_heads",
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_state_size",
)
_STATE_LAYERS = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "gdn"}


class Model:
    """What is looked at of a model; every property is None (or False) where the configuration does not tell."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @property
    def known(self) -> bool:
        """Whether there is a configuration on this machine at all."""
        return bool(self.config)

    def _number(self, *names: str) -> int | None:
        found = (self.config.get(name) for name in names)
        return next((number for number in found if isinstance(number, int) and number), None)

    @property
    def experts(self) -> int | None:
        """Routed experts of a layer; None for a dense model."""
        return self._number(*_EXPERTS)

    @property
    def heads(self) -> int | None:
        """Attention heads."""
        return self._number("num_attention_heads")

    @property
    def kv_heads(self) -> int | None:
        """Heads of keys and values; one with multi-head latent attention."""
        return 1 if self.latent else self._number("num_key_value_heads", "num_attention_heads")

    @property
    def head_size(self) -> int | None:
        """Elements of a head."""
        hidden = self._number("hidden_size")
        return self._number("head_dim") or (hidden // self.heads if hidden and self.heads else None)

    @property
    def latent(self) -> bool:
        """Whether it has multi-head latent attention (MLA)."""
        return self._number("kv_lora_rank") is not None

    @property
    def sparse(self) -> bool:
        """Whether its attention picks tokens by an indexer of its own (DeepSeek-V3.2, GLM-5)."""
        return self._number("index_topk", "index_n_heads") is not None

    @property
    def hybrid(self) -> bool:
        """Whether some layers keep a state instead of keys and values."""
        layers = self.config.get("layer_types")
        named = _STATE_LAYERS.intersection(layers) if isinstance(layers, list) else ()
        return bool(named) or any(self.config.get(name) for name in _STATE)

    @property
    def dtype(self) -> str | None:
        """The dtype that the checkpoint names."""
        return checkpoint.dtype(self.config)

    @property
    def declared_kv_quantisation(self) -> str | None:
        """What it declares its KV cache to be quantised to."""
        return checkpoint.declared_kv_quantisation(self.config)
