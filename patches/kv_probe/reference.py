"""Attention as it is defined, in float32, and how far a kernel of a given precision may be from it. Pure torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Kernel", "attend"]

_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-11, "float8_e4m3fn": 2.0**-4}
"""Unit roundoff by torch's name. float32 has that of TF32, in which GPUs multiply it where they may."""

_ACCUMULATION = 2.0**-24
_EXPONENTIAL = 2.0**-16
"""Relative error of a kernel's exponential: vectorised ones are approximations of some 20 units in the last place."""


@dataclass(frozen=True)
class Kernel:
    """What a kernel computes, and where it may round.

    Attributes:
        scale: Factor of the scores.
        softcap: ``softcap * tanh(score / softcap)`` replaces the score; 0 for none.
        compute: Dtype of queries, of the answer, and at worst of scores and weights, by torch's name.
        weights: Dtype of the softmax weights, where the kernel makes them smaller than ``compute``.
        scaled: Whether cached values are multiplied with a scale that is no power of two, which rounds them again.
    """

    scale: float
    compute: str
    softcap: float = 0.0
    weights: str = ""
    scaled: bool = False

    @property
    def unit(self) -> float:
        """Unit roundoff of the dtype that the kernel computes in."""
        return _ROUNDOFF[self.compute]

    @property
    def weight_unit(self) -> float:
        """Unit roundoff of the softmax weights."""
        return _ROUNDOFF[self.weights or self.compute]


def attend(query: Any, key: Any, value: Any, first: int, kernel: Kernel) -> tuple[Any, Any]:
    """The answer to ``query`` and a bound on the error of each of its elements.

    The bound follows the rounding errors through: a score is off by ``unit`` of itself and, where cached keys are
    scaled, by ``unit`` of the sum of its products' sizes; a weight by the exponential of twice that (numerator and
    denominator) and by its own rounding; the answer by that share of the sum of its products' sizes, and its own
    rounding.

    Args:
        query: ``[tokens, heads, head_dim]``, float32.
        key: ``[length, kv_heads, head_dim]``, as it is read back from the cache, float32.
        value: ``[length, kv_heads, head_dim_v]``, likewise.
        first: Position of the first query token among the keys; each attends to itself and what is before it.
        kernel: What is computed, and where it may round.

    Returns:
        Answer and bound, both ``[tokens, heads, head_dim_v]``.
    """
    import torch

    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("thd,lhd->htl", query, key) * kernel.scale
    sizes = torch.einsum("thd,lhd->htl", query.abs(), key.abs()) * abs(kernel.scale)
    if kernel.softcap:
        scores = kernel.softcap * torch.tanh(scores / kernel.softcap)
    positions = torch.arange(key.shape[0])
    visible = positions[None, :] <= first + torch.arange(query.shape[0])[:, None]
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    answer = torch.einsum("htl,lhd->thd", weights, value)
    size = torch.einsum("htl,lhd->thd", weights, value.abs())

    unit = kernel.unit
    share = (unit if kernel.scaled else 0.0) + query.shape[-1] * _ACCUMULATION
    off = (unit * scores.abs() + share * sizes).masked_fill(~visible, 0.0).amax(dim=-1).transpose(0, 1)[..., None]
    relative = torch.expm1(2 * off) + kernel.weight_unit + unit * kernel.scaled + _EXPONENTIAL
    return answer, size * relative + unit * answer.abs() + _EXPONENTIAL * unit
