"""What a model is made of, as far as memory is concerned."""

from __future__ import annotations

from dataclasses import dataclass

from entrypoint.planning.quantisation import Quantisation
from patches.framework.errors import PlanError

__all__ = ["Experts", "GroupedAttention", "Indexer", "LatentAttention", "ModelShape"]


@dataclass(frozen=True)
class GroupedAttention:
    """Multi-head, grouped-query or multi-query attention: K and V of ``kv_heads`` heads are kept a token."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True)
class Indexer:
    """DeepSeek's sparse-attention indexer, whole on every device, with an FP8 cache of its own."""

    heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: one vector of ``kv_lora_rank + rope_dim`` is kept a token, on every TP rank."""

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    indexer: Indexer | None = None


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts block of a layer.

    Attributes:
        number: Routed experts.
        intermediate: Width of one of them.
        top_k: How many of them a token goes to.
        shared_intermediate: Width of the shared expert; 0 where there is none.
        shared_gate: Whether the shared expert has a gate of its own.
        shared_whole: Whether it is whole on each device where tokens are spread over TP ranks (DeepSeek).
        correction_bias: Whether the router has a float32 bias an expert.
        router_follows: Whether the router may be quantised as the linear layers are.
    """

    number: int
    intermediate: int
    top_k: int
    shared_intermediate: int = 0
    shared_gate: bool = False
    shared_whole: bool = False
    correction_bias: bool = False
    router_follows: bool = False

    def __post_init__(self) -> None:
        if self.top_k > self.number:
            raise PlanError(f"{self.top_k} experts a token of {self.number}", "at most all of them", "Correct it.")


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only language model.

    Attributes:
        architecture: Its name in the configuration.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        vocabulary: Rows of the embedding, before padding.
        tied: Whether embedding and output layer are one.
        attention: Every layer's attention.
        intermediate: Width of a dense layer's MLP.
        mlp_bias: Whether a dense MLP has biases.
        experts: The sparse layers' experts, or None.
        sparse: Indices of the layers with experts.
        max_len: Longest sequence, in tokens, or None where the configuration leaves it open.
        limit: Longest sequence that vLLM lets a flag ask for, or None where the configuration leaves it open.
        dtype: Name of the dtype that ``--dtype auto`` gives the weights.
        quantisation: How the checkpoint's linear layers are stored.
        ends_everywhere: Whether every pipeline stage holds embedding, output layer and last norm, as in vLLM's Mixtral
            and Qwen-MoE classes.
        declared_kv: What the checkpoint declares its KV cache to be quantised to, or None.
        kv_scales: Whether vLLM looks for scales of the KV cache in the checkpoint.
    """

    architecture: str
    layers: int
    hidden: int
    vocabulary: int
    tied: bool
    attention: GroupedAttention | LatentAttention
    intermediate: int
    mlp_bias: bool
    experts: Experts | None
    sparse: frozenset[int]
    max_len: int | None
    limit: int | None
    dtype: str
    quantisation: Quantisation
    ends_everywhere: bool = False
    declared_kv: str | None = None
    kv_scales: bool = False

    def __post_init__(self) -> None:
        if not self.intermediate and len(self.sparse) < self.layers:
            raise PlanError(f"a configuration of {self.architecture} without 'intermediate_size'",
                            "the width of a dense layer's MLP", "Correct it.")  # fmt: skip
