"""What the ranks of :mod:`support.cpu_ranks` do in the tests of expert parallelism on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["filled", "gather", "gather_one", "moe_layer", "reduce_scatter", "traffic"]

Spec = tuple[torch.dtype, tuple[int, ...]]
"""Type and row shape of a tensor."""


def filled(spec: Spec, rows: int, seed: int) -> torch.Tensor:
    """The same random tensor of shape (rows, ...) in every process that asks with the same arguments."""
    dtype, shape = spec
    source = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn((rows, *shape), generator=source).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (rows, *shape), generator=source).to(dtype)


def gather(communicator: Any, specs: Sequence[Spec], sizes: list[int], dim: int) -> list[torch.Tensor]:
    """A list of tensors through ``all_gatherv``, filled with the seeds ``100 * rank + index``."""
    rank = communicator.rank_in_group
    tensors = [filled(spec, sizes[rank], 100 * rank + i).movedim(0, dim) for i, spec in enumerate(specs)]
    gathered = communicator.all_gatherv(tensors, dim, sizes)
    return [tensor.movedim(dim, 0).contiguous() for tensor in gathered]


def gather_one(communicator: Any, tensor: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
    """One tensor through ``all_gatherv``."""
    gathered: torch.Tensor = communicator.all_gatherv(tensor, 0, sizes)
    return gathered


def reduce_scatter(communicator: Any, tensor: torch.Tensor, dim: int, sizes: list[int] | None) -> torch.Tensor:
    """One tensor through ``reduce_scatterv``."""
    part: torch.Tensor = communicator.reduce_scatterv(tensor, dim, sizes)
    return part


def traffic(communicator: Any, specs: Sequence[Spec], sizes: list[int]) -> dict[str, Any]:
    """Collectives and bytes received of one gather and one reduce-scatter."""
    calls: list[int] = []
    exchange = dist.all_to_all_single

    def counting(output: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        calls.append(output.numel() * output.element_size())
        return exchange(output, *arguments, **options)

    rank = communicator.rank_in_group
    dist.all_to_all_single = counting
    try:
        gathered = communicator.all_gatherv([filled(spec, sizes[rank], 0) for spec in specs], 0, sizes)
        communicator.reduce_scatterv(gathered[0].contiguous(), 0, sizes)
    finally:
        dist.all_to_all_single = exchange
    return {"calls": len(calls), "gather": calls[0], "reduce": calls[1]}


def moe_layer(communicator: Any, layer: Any, sizes: list[int], seed: int) -> torch.Tensor:
    """One expert-parallel layer as vLLM runs it: gather, own experts, reduce-scatter; returns the rank's rows."""
    from support.cpu_experts import Batch, apply_rank, routed

    rank = communicator.rank_in_group
    gathered = Batch(*communicator.all_gatherv(list(routed(layer, sizes[rank], seed + rank)), 0, sizes))
    partial = apply_rank(layer, gathered, rank, len(sizes), patched=True)
    part: torch.Tensor = communicator.reduce_scatterv(partial, 0, sizes)
    return part
