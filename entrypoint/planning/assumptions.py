"""What a start measures and a plan can't: activations, CUDA graphs, context and communication. Ranges, never numbers.

The low end counts the tensors that are alive at once in the profile run; the high end adds what has been seen on top of
that (copies of the logits, dummy tokens that all go to the experts of one rank, graphs taken at three times their
estimate). Neither end was measured on a GPU by this project. Every range can be replaced by a measured amount.
"""

from __future__ import annotations

from dataclasses import dataclass

from entrypoint.planning.shape import GroupedAttention, ModelShape
from entrypoint.planning.sizes import GIB
from entrypoint.planning.split import Split

__all__ = ["Batch", "Range", "activation", "batch", "graphs", "other"]

FLOAT32 = 4
LARGE_DEVICE = 70 * GIB
"""From here on vLLM's defaults are larger, unless the device is an A100."""
_SMALL, _LARGE = (2048, 256), (8192, 1024)
_RESIDUALS = 3
_LOGIT_COPIES = 3


@dataclass(frozen=True)
class Range:
    """An amount between two bounds, in bytes.

    Attributes:
        low: Lower bound.
        high: Upper bound.
        basis: ``assumed``, or ``given``: then both bounds are the same.
        why: What it is made of.
    """

    low: int
    high: int
    basis: str
    why: str

    @classmethod
    def given(cls, size: int, flag: str) -> Range:
        """A measured amount."""
        return cls(size, size, "given", flag)


@dataclass(frozen=True)
class Batch:
    """Bounds of what one step computes: tokens, and sequences that get logits."""

    tokens: tuple[int, int]
    sequences: tuple[int, int]


def batch(device_bytes: int, tokens: int | None, sequences: int | None) -> Batch:
    """The profile run's batch: as given, else between vLLM's defaults that are possible for a device of this size."""
    largest = _LARGE if device_bytes >= LARGE_DEVICE else _SMALL
    return Batch(
        (tokens, tokens) if tokens else (_SMALL[0], largest[0]),
        (sequences, sequences) if sequences else (_SMALL[1], largest[1]),
    )


def activation(shape: ModelShape, split: Split, step: Batch, dtype_bytes: int) -> Range:
    """The peak of the profile run."""
    low = step.tokens[0] * _width(shape, split, skewed=False) * dtype_bytes
    high = step.tokens[1] * _width(shape, split, skewed=True) * dtype_bytes
    logits = [sequences * shape.vocabulary for sequences in step.sequences]
    low += logits[0] * (dtype_bytes + FLOAT32)
    high += logits[1] * (dtype_bytes + _LOGIT_COPIES * FLOAT32)
    why = f"{step.tokens[0]} to {step.tokens[1]} tokens and {step.sequences[0]} to {step.sequences[1]} sequences a step"
    return Range(low, max(low, high), "assumed", why)


def _width(shape: ModelShape, split: Split, *, skewed: bool) -> int:
    """Elements alive a token: the residual stream, and the widest block of a layer."""
    return _RESIDUALS * shape.hidden + max(
        _attention_width(shape, split), 3 * shape.intermediate // split.tp, _expert_width(shape, split, skewed=skewed)
    )


def _attention_width(shape: ModelShape, split: Split) -> int:
    attention = shape.attention
    if isinstance(attention, GroupedAttention):
        return (2 * attention.heads + 2 * attention.kv_heads) * attention.head_dim // split.tp
    query = attention.heads * (attention.nope_dim + attention.rope_dim)
    return (2 * query + 2 * attention.heads * attention.v_dim) // split.tp


def _expert_width(shape: ModelShape, split: Split, *, skewed: bool) -> int:
    """The tokens of all DP ranks meet at the experts; skewed, all of them go to those of one rank."""
    experts = shape.experts
    if experts is None:
        return 0
    gathered = split.dp * 2 * shape.hidden
    pairs = split.dp * experts.top_k if skewed else -(-split.dp * experts.top_k // split.ep)
    return gathered + pairs * (3 * experts.intermediate // split.expert_shards + shape.hidden)


def graphs(*, eager: bool) -> Range:
    """Captured CUDA graphs."""
    if eager:
        return Range(0, 0, "given", "--enforce-eager")
    return Range(GIB // 4, 3 * GIB, "assumed", "captured CUDA graphs")


def other(split: Split) -> Range:
    """Device context, workspaces of attention and matrix kernels, buffers of the communication libraries."""
    groups = split.devices > 1
    return Range(GIB // 2, (4 if groups else 2) * GIB, "assumed", "context, workspaces, communication buffers")
