"""Gather and reduce-scatter of tensors whose row counts differ between ranks, over gloo.

Both are one uneven all-to-all. Measured against padding to the longest rank and an all-reduce, it moves no padding,
needs a third of the calls, and leaves the sum to the receiver, which adds in rank order in float32: the result depends
neither on the ring's order nor on the number of ranks.

Per mixture-of-experts layer that makes 2 collectives, whatever the number of ranks, tensors or tokens. With ``T``
tokens in the batch over all ranks and ``b`` bytes a row, a rank receives ``(T - own) * b`` bytes in the gather and
``(ranks - 1) * own * b`` in the reduce-scatter: linear in the tokens, and over all ranks linear in the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["gather_rows", "reduce_rows"]

_SUMMED_IN_FLOAT32 = (torch.bfloat16, torch.float16)


def gather_rows(tensors: Sequence[torch.Tensor], sizes: Sequence[int], group: Any) -> list[torch.Tensor]:
    """The tensors of all ranks one below the other, in rank order.

    Args:
        tensors: This rank's, each of shape (own rows, ...), of any types; rows travel as bytes, side by side.
        sizes: Rows of each rank, in rank order; 0 is a rank without tokens.
        group: The process group.

    Returns:
        One tensor of shape (sum of sizes, ...) for each of ``tensors``.
    """
    rows = [_as_bytes(tensor) for tensor in tensors]
    packed = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
    received = packed.new_empty((sum(sizes), packed.shape[1]))
    own = packed.shape[0]
    dist.all_to_all_single(received, packed.repeat(len(sizes), 1), list(sizes), [own] * len(sizes), group=group)
    columns = received.split([row.shape[1] for row in rows], dim=1)
    return [_from_bytes(column, tensor) for column, tensor in zip(columns, tensors, strict=True)]


def reduce_rows(tensor: torch.Tensor, sizes: Sequence[int], rank: int, group: Any) -> torch.Tensor:
    """This rank's rows of the sum over all ranks.

    Args:
        tensor: Shape (sum of sizes, ...), contiguous; half precision is summed in float32.
        sizes: Rows that each rank keeps, in rank order.
        rank: This process's place in the group.
        group: The process group.

    Returns:
        A tensor of shape (``sizes[rank]``, ...) and the type of ``tensor``.
    """
    own, ranks, shape = sizes[rank], len(sizes), tensor.shape[1:]
    received = tensor.new_empty((ranks * own, *shape))
    dist.all_to_all_single(received, tensor, [own] * ranks, list(sizes), group=group)
    dtype = torch.float32 if tensor.dtype in _SUMMED_IN_FLOAT32 else tensor.dtype
    return received.view(ranks, own, *shape).sum(dim=0, dtype=dtype).to(tensor.dtype)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as (rows, bytes of a row), uint8."""
    flat = tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)
    return flat.contiguous().view(torch.uint8)


def _from_bytes(column: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_as_bytes`: type and row shape of ``like``, in memory aligned for its type."""
    aligned = column.clone(memory_format=torch.contiguous_format)
    return aligned.view(like.dtype).view(column.shape[0], *like.shape[1:])
