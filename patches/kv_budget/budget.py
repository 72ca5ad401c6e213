"""The KV budget as a pure model: one number of blocks, split once by data parallelism and by nothing else.

Every DP rank holds its own requests, so the pool is split by DP. Expert parallelism spreads the experts of the same
forward pass over the same devices: each of its ranks sees the pool of its DP rank whole, with all of its KV heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from patches.framework.errors import BudgetError

__all__ = [
    "KVCacheBudget",
    "RankBlocks",
    "assert_kv_consistent_before_init",
    "build_block_table",
    "compute_kv_blocks",
]

NULL_BLOCK = 0


@dataclass(frozen=True)
class RankBlocks:
    """What one rank plans to allocate.

    Attributes:
        dp_rank: Rank in the data-parallel group.
        ep_rank: Rank in the expert-parallel group.
        num_blocks: Blocks of its KV cache.
        block_size: Tokens a block.
    """

    dp_rank: int
    ep_rank: int
    num_blocks: int
    block_size: int

    @property
    def name(self) -> str:
        """The rank as messages write it."""
        return f"dp {self.dp_rank} ep {self.ep_rank}"


@dataclass(frozen=True)
class KVCacheBudget:
    """The one authority for the number of KV blocks.

    Attributes:
        num_blocks_global: Blocks over all DP ranks.
        dp_size: Data-parallel size; the only thing that divides the blocks.
        ep_size: Expert-parallel size; divides nothing.
        block_size: Tokens a block, the same on every rank.

    Raises:
        BudgetError: a number is not positive, or ``num_blocks_global`` does not divide by ``dp_size``.
    """

    num_blocks_global: int
    dp_size: int
    ep_size: int
    block_size: int

    def __post_init__(self) -> None:
        for name in ("num_blocks_global", "dp_size", "ep_size", "block_size"):
            if getattr(self, name) < 1:
                raise BudgetError(f"{name}={getattr(self, name)}", "a positive number", "Correct the configuration.")
        if self.num_blocks_global % self.dp_size:
            raise BudgetError(
                f"{self.num_blocks_global} KV blocks do not divide by data_parallel_size={self.dp_size}",
                "the same number of blocks on every DP rank",
                f"Use {max(1, self.num_blocks_global // self.dp_size) * self.dp_size} blocks.",
            )

    @classmethod
    def of_smallest(cls, blocks: Sequence[int], *, ep_size: int, block_size: int) -> KVCacheBudget:
        """The budget that every rank can hold: that of the smallest one, times DP, so that it always divides.

        Args:
            blocks: What each DP rank can hold, in blocks.
            ep_size: Expert-parallel size.
            block_size: Tokens a block.
        """
        return cls(min(blocks, default=0) * len(blocks), len(blocks), ep_size, block_size)

    @property
    def per_dp_blocks(self) -> int:
        """Blocks of one DP rank."""
        return self.num_blocks_global // self.dp_size

    @property
    def per_ep_view_blocks(self) -> int:
        """Blocks that one EP rank sees: those of its DP rank, whatever ``ep_size`` is."""
        return self.per_dp_blocks

    @property
    def per_dp_tokens(self) -> int:
        """Tokens that the blocks of one DP rank hold."""
        return self.per_dp_blocks * self.block_size

    def kv_heads(self, total_kv_heads: int, tp_size: int) -> int:
        """KV heads in a worker's block: tensor parallelism shards (or replicates) them, EP leaves them alone.

        Raises:
            BudgetError: neither number divides the other.
        """
        if min(total_kv_heads, tp_size) < 1 or max(total_kv_heads, tp_size) % min(total_kv_heads, tp_size):
            raise BudgetError(
                f"{total_kv_heads} KV heads over tensor_parallel_size={tp_size}",
                "numbers of which one divides the other",
                "Change the tensor-parallel size.",
            )
        return max(1, total_kv_heads // tp_size)

    def block_table_shape(self, max_blocks_per_seq: int) -> tuple[int, int]:
        """Shape of a DP rank's block table, sequences x blocks: a block holds tokens of one sequence only."""
        return (self.per_dp_blocks, max_blocks_per_seq)

    def validate_all_ranks(self, ranks: Iterable[RankBlocks]) -> None:
        """Hold what ranks plan against this budget.

        Raises:
            BudgetError: a rank differs in blocks or block size; each such rank is named with both values.
        """
        problems = [problem for rank in ranks for problem in self._problems(rank)]
        if problems:
            raise BudgetError(
                "; ".join(problems),
                f"{self.per_dp_blocks} blocks of {self.block_size} tokens on every rank",
                "Give every rank the same flags and release; `splint report` shows what each of them measured.",
            )

    def _problems(self, rank: RankBlocks) -> list[str]:
        wanted = {"num_blocks": ("blocks", self.per_dp_blocks), "block_size": ("tokens a block", self.block_size)}
        return [
            f"{rank.name} has {getattr(rank, field)} {unit}, not {value}"
            for field, (unit, value) in wanted.items()
            if getattr(rank, field) != value
        ]


def compute_kv_blocks(
    num_blocks_global: int, *, dp_size: int, ep_size: int, block_size: int
) -> dict[tuple[int, int], int]:
    """Blocks that each ``(dp_rank, ep_rank)`` sees.

    Raises:
        BudgetError: see :class:`KVCacheBudget`.
    """
    budget = KVCacheBudget(num_blocks_global, dp_size, ep_size, block_size)
    return {(dp, ep): budget.per_ep_view_blocks for dp in range(dp_size) for ep in range(ep_size)}


def build_block_table(budget: KVCacheBudget, max_blocks_per_seq: int) -> Any:
    """An empty block table of one DP rank: int32, :meth:`KVCacheBudget.block_table_shape`, all null block."""
    import numpy as np

    return np.full(budget.block_table_shape(max_blocks_per_seq), NULL_BLOCK, dtype=np.int32)


def assert_kv_consistent_before_init(ranks: Sequence[RankBlocks]) -> KVCacheBudget:
    """The budget that all ranks plan alike; called before any of them allocates.

    Args:
        ranks: One entry a rank, at least one.

    Raises:
        BudgetError: there is no rank, or one differs from the first; it is named with both values.
    """
    if not ranks:
        raise BudgetError("no rank has reported", "one report a rank", "Start the engines first.")
    first = ranks[0]
    dp_size = len({rank.dp_rank for rank in ranks})
    ep_size = len({rank.ep_rank for rank in ranks})
    budget = KVCacheBudget(first.num_blocks * dp_size, dp_size, ep_size, first.block_size)
    budget.validate_all_ranks(ranks)
    return budget
