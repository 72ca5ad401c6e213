"""The CPU experts classes under expert parallelism, on the real kernels, against a dense reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_experts import FP8_BLOCK, Layer, apply_rank, reference, routed

from patches import cpu_expert_parallel

LAYERS = {
    "bfloat16": Layer(),
    "float16": Layer(dtype=torch.float16),
    "float32": Layer(dtype=torch.float32),
    "int8": Layer(kind="int8"),
    "fp8": Layer(kind="fp8", hidden=2 * FP8_BLOCK, intermediate=FP8_BLOCK),
    "weight on input": Layer(chosen=1, weight_on_input=True),
    "uneven experts": Layer(experts=7, chosen=3),
}


def over_ranks(layer: Layer, ranks: int, tokens: int, *, patched: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of what the experts of every rank give, in float32, and the reference."""
    batch = routed(layer, tokens, 5)
    parts = [apply_rank(layer, batch, rank, ranks, patched=patched).float() for rank in range(ranks)]
    return torch.stack(parts).sum(0), reference(layer, batch)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_ranks_add_up_to_the_dense_reference(layer: Layer, ranks: int) -> None:
    found, wanted = over_ranks(layer, ranks, tokens=33)
    one_rank, _ = over_ranks(layer, 1, tokens=33)
    rounding = torch.finfo(layer.dtype).eps * wanted.abs().max()
    assert (found - wanted).abs().max() <= (one_rank - wanted).abs().max() + rounding


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(2, 8), tokens=st.integers(1, 90), chosen=st.integers(1, 8))
def test_any_number_of_ranks_tokens_and_experts_a_token(ranks: int, tokens: int, chosen: int) -> None:
    found, wanted = over_ranks(Layer(chosen=chosen), ranks, tokens)
    torch.testing.assert_close(found, wanted, atol=3e-2, rtol=3e-2)


def test_stock_computes_foreign_experts_with_the_weights_of_local_ones() -> None:
    """Rank 1 of 2 holds experts 4 to 7; every token here goes to 0 to 3, so the right share of rank 1 is nothing."""
    layer = Layer()
    batch = routed(layer, 16, 5)
    batch = batch._replace(ids=batch.ids % 4)
    stock, patched = (apply_rank(layer, batch, 1, 2, patched=patched) for patched in (False, True))
    assert stock.abs().max() > 0.1
    assert torch.equal(patched, torch.zeros_like(patched))


def test_a_foreign_token_that_overflows_here_does_not_poison_the_sum() -> None:
    """Weights of zero would not do: in float16 an expert that a token was never routed to may give infinity."""
    layer = Layer(dtype=torch.float16)
    batch = routed(layer, 4, 5)
    batch = batch._replace(hidden=batch.hidden * 3e3, ids=torch.full_like(batch.ids, 6))
    huge = apply_rank(layer, batch, 0, 2, patched=True)
    assert torch.equal(huge, torch.zeros_like(huge))


def test_without_expert_parallelism_nothing_changes() -> None:
    layer = Layer()
    batch = routed(layer, 20, 5)
    stock, patched = (apply_rank(layer, batch, 0, 1, patched=patched) for patched in (False, True))
    assert torch.equal(stock, patched)


def test_every_class_that_vllm_takes_for_expert_parallelism_is_covered() -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts

    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.use_ep, parallel.ep_size = True, 2
    experts: list[Any] = [found for found in vars(cpu_moe).values() if isinstance(found, type)]
    accepted = {
        found.__name__
        for found in experts
        if issubclass(found, FusedMoEExperts) and "apply" in vars(found) and found._supports_parallel_config(parallel)
    }
    covered = {
        target.qualname.split(".")[0] for target in cpu_expert_parallel.PATCH.targets if ".apply" in target.qualname
    }
    assert covered == accepted
