"""``SPLINT_KV_BUDGET_RANKS``: a share of its own for a DP rank whose device is smaller, or shared with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patches.framework import settings
from patches.framework.errors import BudgetError

__all__ = ["SETTING", "apply", "share_of"]

SETTING = "SPLINT_KV_BUDGET_RANKS"


def share_of(dp_rank: int, dp_size: int, shares: Mapping[int, float | int] | None = None) -> float | int | None:
    """What this DP rank was given, or None.

    Raises:
        BudgetError: the setting names a rank that the group does not have.
    """
    shares = settings.get(SETTING) if shares is None else shares
    beyond = sorted(rank for rank in shares if rank >= dp_size)
    if beyond:
        raise BudgetError(
            f"{SETTING} names DP rank {beyond[0]}",
            f"ranks 0 to {dp_size - 1} (data_parallel_size={dp_size})",
            "Correct it.",
        )
    return shares.get(dp_rank)


def apply(share: float | None, cache_config: Any) -> None:
    """Write the share into a rank's cache configuration, before its workers are made from it."""
    if isinstance(share, float):
        cache_config.gpu_memory_utilization = share
        cache_config.kv_cache_memory_bytes = None
    elif share is not None:
        cache_config.kv_cache_memory_bytes = share
