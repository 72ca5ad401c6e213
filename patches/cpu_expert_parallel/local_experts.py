"""Handing an expert kernel only the work of the experts that this rank holds.

The CPU kernels index their weights by the ids that they are given and know no "not mine". So the (token, expert) pairs
of local experts are picked, run as tokens with one expert each, and added up per token in float32. The experts of other
ranks cost nothing here, and a token of theirs can't overflow in an expert that it was never routed to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LocalPairs", "add_up", "pick"]


class LocalPairs(NamedTuple):
    """The (token, expert) pairs of the experts of one rank.

    Attributes:
        token: Row in the batch, int64, shape (pairs,), ascending.
        expert: Local expert id, shape (pairs, 1), the type of ``expert_map``.
        weight: Router weight, float32, shape (pairs, 1).
    """

    token: torch.Tensor
    expert: torch.Tensor
    weight: torch.Tensor


def pick(topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_map: torch.Tensor) -> LocalPairs:
    """Pick the pairs whose expert ``expert_map`` (global id to local id, -1 elsewhere) places on this rank.

    Args:
        topk_ids: Global expert ids, shape (tokens, experts per token).
        topk_weights: Router weights, the same shape.
        expert_map: Shape (experts,), int32.
    """
    local = expert_map[topk_ids]
    token, choice = torch.nonzero(local >= 0, as_tuple=True)
    return LocalPairs(token, local[token, choice].unsqueeze(1), topk_weights[token, choice].unsqueeze(1))


def add_up(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    pairs: LocalPairs,
    run: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Write the sum of every token's local experts to ``output`` (tokens, hidden); 0 for a token that has none here.

    Args:
        output: Written, shape (tokens, hidden).
        hidden_states: Shape (tokens, hidden).
        pairs: What to run.
        run: Called with an empty output and the input, both of shape (pairs, hidden), if there are pairs.
    """
    if not pairs.token.numel():
        output.zero_()
        return
    partial = output.new_empty((pairs.token.numel(), output.shape[1]))
    run(partial, hidden_states[pairs.token])
    output.copy_(torch.zeros_like(output, dtype=torch.float32).index_add_(0, pairs.token, partial.float()))
