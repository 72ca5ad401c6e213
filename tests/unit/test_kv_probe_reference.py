"""The float32 reference is attention; its bound holds for a kernel that rounds everywhere, but not for a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patches.kv_probe.reference import Kernel, attend

HEADS, KV_HEADS, DIM, LENGTH, NEW = 4, 2, 64, 133, 3
SCALE = DIM**-0.5


def numbers(seed: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int, spread: float) -> Any:
        return (torch.rand(shape, generator=source) * 2 - 1).mul(spread).to(dtype).float()

    return draw(NEW, HEADS, DIM, spread=3), draw(LENGTH, KV_HEADS, DIM, spread=1), draw(LENGTH, KV_HEADS, DIM, spread=1)


def rounding_kernel(query: Any, key: Any, value: Any, dtype: torch.dtype) -> Any:
    """Attention that rounds scores, weights and answer to ``dtype``: the worst that a kernel may do."""
    repeats = HEADS // KV_HEADS
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (torch.einsum("thd,lhd->htl", query, key) * SCALE).to(dtype).float()
    hidden = torch.arange(LENGTH)[None, :] > LENGTH - NEW + torch.arange(NEW)[:, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    unnormalised = (scores - scores.amax(-1, keepdim=True)).exp().to(dtype).float()
    answer = torch.einsum("htl,lhd->thd", unnormalised / unnormalised.sum(-1, keepdim=True), value)
    return answer.to(dtype).float()


def test_the_reference_is_attention() -> None:
    query, key, value = numbers(0, torch.float32)
    answer, _ = attend(query, key, value, LENGTH - NEW, Kernel(SCALE, "float32"))
    mask = torch.arange(LENGTH)[None, :] <= LENGTH - NEW + torch.arange(NEW)[:, None]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.double().transpose(0, 1), key.double().transpose(0, 1), value.double().transpose(0, 1), mask,
        enable_gqa=True,
    )  # fmt: skip
    assert (answer - wanted.transpose(0, 1)).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_the_bound_holds_for_a_kernel_that_rounds_everywhere(dtype: torch.dtype, seed: int) -> None:
    query, key, value = numbers(seed, dtype)
    answer, bound = attend(query, key, value, LENGTH - NEW, Kernel(SCALE, str(dtype).removeprefix("torch.")))
    share = (rounding_kernel(query, key, value, dtype) - answer).abs() / bound
    assert 0.01 < share.max() < 1


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_does_not_hold_for_two_blocks_in_each_others_place(seed: int) -> None:
    query, key, value = numbers(seed, torch.bfloat16)
    answer, bound = attend(query, key, value, LENGTH - NEW, Kernel(SCALE, "bfloat16"))
    moved = torch.cat([key[16:32], key[:16], key[32:]])
    assert ((rounding_kernel(query, moved, value, torch.bfloat16) - answer).abs() / bound).max() > 2


def test_a_soft_cap_is_part_of_the_reference() -> None:
    query, key, value = numbers(1, torch.float32)
    plain, _ = attend(query, key, value, LENGTH - NEW, Kernel(SCALE, "float32"))
    capped, _ = attend(query, key, value, LENGTH - NEW, Kernel(SCALE, "float32", softcap=0.5))
    barely, _ = attend(query, key, value, LENGTH - NEW, Kernel(SCALE, "float32", softcap=1e4))
    assert (plain - capped).abs().max() > 0.1
    assert (plain - barely).abs().max() < 1e-5


def test_a_scale_that_rounds_again_widens_the_bound() -> None:
    query, key, value = numbers(2, torch.bfloat16)
    _, bound = attend(query, key, value, LENGTH - NEW, Kernel(SCALE, "bfloat16"))
    _, wider = attend(query, key, value, LENGTH - NEW, Kernel(SCALE, "bfloat16", scaled=True))
    assert (wider > bound).all()
