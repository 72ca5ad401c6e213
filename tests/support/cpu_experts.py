"""vLLM's real CPU experts classes with random weights, and a dense reference in float32."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from patches.framework.records import Seam

__all__ = ["Batch", "Layer", "apply_rank", "reference", "routed"]

FP8_BLOCK = 128
"""Rows and columns that share a scale."""


@dataclass(frozen=True)
class Layer:
    """A mixture-of-experts layer, described so that every process makes the same weights.

    Attributes:
        kind: ``unquantized``, ``int8`` or ``fp8``, the experts class that runs it.
        weight_on_input: The router's weight is on the input already (one expert a token), as in Llama 4.
    """

    kind: str = "unquantized"
    experts: int = 8
    chosen: int = 2
    hidden: int = 64
    intermediate: int = 32
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    weight_on_input: bool = False

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up of shape (experts, 2 * intermediate, hidden), down of shape (experts, hidden, intermediate)."""
        source = torch.Generator().manual_seed(self.seed)
        w13 = torch.randn(self.experts, 2 * self.intermediate, self.hidden, generator=source) * self.hidden**-0.5
        w2 = torch.randn(self.experts, self.hidden, self.intermediate, generator=source) * self.intermediate**-0.5
        return w13.to(self.dtype), w2.to(self.dtype)


class Batch(NamedTuple):
    """Hidden states, router weights (float32) and global expert ids (int32) of some tokens."""

    hidden: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def routed(layer: Layer, tokens: int, seed: int) -> Batch:
    """Random tokens, routed at random."""
    source = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, layer.hidden, generator=source).to(layer.dtype)
    scores = torch.rand(tokens, layer.experts, generator=source)
    weights, ids = scores.topk(layer.chosen, dim=1)
    return Batch(hidden, (weights / weights.sum(1, keepdim=True)).contiguous(), ids.to(torch.int32))


def reference(layer: Layer, batch: Batch) -> torch.Tensor:
    """All experts, dense, in float32."""
    w13, w2 = (weight.float() for weight in layer.weights())
    gate, up = torch.einsum("th,eih->tei", batch.hidden.float(), w13).chunk(2, dim=-1)
    every = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, w2)
    chosen = every.gather(1, batch.ids.long().unsqueeze(-1).expand(-1, -1, layer.hidden))
    return chosen.sum(1) if layer.weight_on_input else (chosen * batch.weights.unsqueeze(-1)).sum(1)


def apply_rank(layer: Layer, batch: Batch, rank: int, ranks: int, *, patched: bool) -> torch.Tensor:
    """What the experts of rank ``rank`` of ``ranks`` give for the whole batch, with or without the patch."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    from patches.cpu_expert_parallel.wrappers import apply_local_experts

    local, expert_map, _ = determine_expert_map(ranks, rank, layer.experts)
    held = slice(0, layer.experts) if expert_map is None else expert_map >= 0
    experts, w13, w2 = _MAKERS[layer.kind](layer, local, *(weight[held] for weight in layer.weights()))
    stock = inspect.unwrap(type(experts).apply)
    apply = apply_local_experts(Seam("apply", stock, lambda: None)) if patched else stock
    output = torch.full_like(batch.hidden, torch.nan)
    apply(
        experts, output=output, hidden_states=batch.hidden, w1=w13, w2=w2, topk_weights=batch.weights,
        topk_ids=batch.ids, activation=MoEActivation.SILU, global_num_experts=layer.experts,
        expert_map=expert_map, a1q_scale=None, a2_scale=None, workspace13=None, workspace2=None,
        expert_tokens_meta=None, apply_router_weight_on_input=layer.weight_on_input,
    )  # fmt: skip
    return output


def _config(layer: Layer, local: int) -> Any:
    from vllm.model_executor.layers.fused_moe import config as moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return moe.FusedMoEConfig(
        num_experts=layer.experts, experts_per_token=layer.chosen, hidden_dim=layer.hidden,
        intermediate_size=layer.intermediate, num_local_experts=local, num_logical_experts=layer.experts,
        activation=MoEActivation.SILU, device="cpu", routing_method=moe.RoutingMethodType.Renormalize,
        moe_parallel_config=moe.FusedMoEParallelConfig.make_no_parallel(), in_dtype=layer.dtype,
    )  # fmt: skip


def _unquantized(
    layer: Layer, local: int, w13: torch.Tensor, w2: torch.Tensor
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    experts = CPUUnquantizedExperts(_config(layer, local), FUSED_MOE_UNQUANTIZED_CONFIG)
    return experts, cpu_prepack_moe_weight(w13, experts.isa), cpu_prepack_moe_weight(w2, experts.isa)


def _int8(layer: Layer, local: int, w13: torch.Tensor, w2: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    from vllm.model_executor.layers.fused_moe.config import int8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt8

    (q13, s13), (q2, s2) = _to_int8(w13), _to_int8(w2)
    quant = int8_w8a8_moe_quant_config(s13, s2, None, None, per_act_token_quant=True)
    packed = torch.ops._C.convert_weight_packed
    return CPUExpertsInt8(_config(layer, local), quant), packed(q13), packed(q2)


def _to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as int8, and the float32 scale of each output channel."""
    scale = weight.float().abs().amax(-1) / 127
    return (weight.float() / scale.unsqueeze(-1)).round().to(torch.int8), scale


def _fp8(layer: Layer, local: int, w13: torch.Tensor, w2: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a16_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8, prepare_fp8_moe_layer_for_cpu

    (q13, s13), (q2, s2) = _to_fp8(w13), _to_fp8(w2)
    quant = fp8_w8a16_moe_quant_config(s13, s2, block_shape=[FP8_BLOCK, FP8_BLOCK])
    return CPUExpertsFp8(_config(layer, local), quant), *prepare_fp8_moe_layer_for_cpu(q13, q2)


def _to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as float8_e4m3fn, and the float32 scale of each square block."""
    experts, rows, columns = weight.shape
    blocks = weight.float().view(experts, rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    scale = blocks.abs().amax((2, 4)) / torch.finfo(torch.float8_e4m3fn).max
    return (blocks / scale[:, :, None, :, None]).view_as(weight).to(torch.float8_e4m3fn), scale


_MAKERS = {"unquantized": _unquantized, "int8": _int8, "fp8": _fp8}
