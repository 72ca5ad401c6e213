from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from patches.cpu_expert_parallel.collectives import gather_rows, reduce_rows
from patches.cpu_expert_parallel.local_experts import add_up, pick

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from patches.framework.records import Seam

__all__ = ["all_gatherv", "apply_local_experts", "needs_patch", "reduce_scatterv", "select_forward"]


def needs_patch() -> str | None:
    """None on vLLM's CPU backend, else the reason why nothing is to be mended."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else "vLLM does not run on its CPU backend here"


def all_gatherv(seam: Seam) -> Callable[..., torch.Tensor | list[torch.Tensor]]:
    """Define ``CpuCommunicator.all_gatherv``."""

    def all_gatherv(
        self: Any,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenate the ranks' tensors along ``dim``, in rank order.

        Args:
            self: The communicator.
            input_: One tensor, or several that share their size along ``dim``; their types may differ.
            dim: The dimension whose size may differ between ranks.
            sizes: Its size on every rank, 0 allowed; None where it is the same on all.

        Raises:
            ValueError: a size does not fit the tensors or the number of ranks.
        """
        seam.count()
        single = isinstance(input_, torch.Tensor)
        tensors: list[torch.Tensor] = [input_] if single else input_
        rows = [tensor.movedim(dim, 0) for tensor in tensors]
        sizes = [rows[0].shape[0]] * self.world_size if sizes is None else sizes
        _check_sizes(sizes, self.world_size)
        for tensor in rows:
            _check_rows(tensor.shape[0], sizes[self.rank_in_group])
        gathered = [tensor.movedim(0, dim) for tensor in gather_rows(rows, sizes, self.device_group)]
        return gathered[0] if single else gathered

    return all_gatherv


def reduce_scatterv(seam: Seam) -> Callable[..., torch.Tensor]:
    """Define ``CpuCommunicator.reduce_scatterv``."""

    def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Sum the ranks' tensors, all of one shape, and keep this rank's part along ``dim``.

        Args:
            self: The communicator.
            input_: The tensor; half precision is summed in float32.
            dim: The dimension that is divided between the ranks.
            sizes: Every rank's part of it, 0 allowed; None for equal parts.

        Raises:
            ValueError: the sizes do not add up to the tensor's, or it can't be divided equally.
        """
        seam.count()
        rows = input_.movedim(dim, 0).contiguous()
        sizes = _equal_parts(rows.shape[0], self.world_size) if sizes is None else sizes
        _check_sizes(sizes, self.world_size)
        _check_rows(rows.shape[0], sum(sizes))
        return reduce_rows(rows, sizes, self.rank_in_group, self.device_group).movedim(0, dim)

    return reduce_scatterv


def apply_local_experts(seam: Seam) -> Callable[..., None]:
    """Wrap the ``apply`` of a CPU experts class: under expert parallelism it gets the pairs of local experts alone.

    vLLM calls it by keyword. Where ``apply_router_weight_on_input`` is set, vLLM has weighted the input already and the
    class leaves the output unweighted, which stays right because foreign experts never reach it.
    """

    @wraps(seam.original)
    def apply(self: Any, **call: Any) -> None:
        if call["expert_map"] is None:
            seam.original(self, **call)
            return
        seam.count()
        pairs = pick(call["topk_ids"], call["topk_weights"], call["expert_map"])

        def run(output: torch.Tensor, hidden_states: torch.Tensor) -> None:
            routed = {"topk_weights": pairs.weight, "topk_ids": pairs.expert, "expert_map": None}
            seam.original(self, **{**call, "output": output, "hidden_states": hidden_states, **routed})

        add_up(call["output"], call["hidden_states"], pairs, run)

    return apply


def select_forward(seam: Seam) -> Callable[[Any], Callable[..., Any]]:
    """Wrap ``MoERunner._select_forward``: across ranks the layer is one opaque operator, as on GPUs.

    Stock lets the compiler trace into the layer on CPU. The other ranks' row counts are numbers that it can't know
    ("Could not guard on data-dependent expression"), and the warm-up fails.
    """

    @wraps(seam.original)
    def _select_forward(self: Any) -> Callable[..., Any]:
        parallel = self.moe_config.moe_parallel_config
        if parallel.dp_size == 1 and not parallel.use_ep:
            chosen: Callable[..., Any] = seam.original(self)
            return chosen
        seam.count()
        operators = torch.ops.vllm
        opaque: Callable[..., Any] = (
            operators.moe_forward if self._shared_experts is None else operators.moe_forward_shared
        )
        return opaque

    return _select_forward


def _equal_parts(rows: int, ranks: int) -> list[int]:
    if rows % ranks:
        raise ValueError(f"{rows} rows can't be divided equally between {ranks} ranks: pass sizes")
    return [rows // ranks] * ranks


def _check_sizes(sizes: Sequence[int], ranks: int) -> None:
    if len(sizes) != ranks:
        raise ValueError(f"{len(sizes)} sizes for {ranks} ranks: pass one size a rank")


def _check_rows(found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(f"{found} rows where the sizes say {wanted}: tensor and sizes must come from the same batch")
