"""``SPLINT_KV_BUDGET_RANKS``: a share of its own for a DP rank whose device is smaller, or shared with others."""

from __future__ import annotations

from typing import Any

from patches.framework import settings
from patches.framework.errors import BudgetError

__all__ = ["SETTING", "apply", "share_of"]

SETTING = "SPLINT_KV_BUDGET_RANKS"


def share_of(dp_rank: int, dp_size: int) -> dict[str, Any]:
    """What this DP rank was given, as fields of vLLM's cache configuration; empty where nothing was said.

    Raises:
        BudgetError: the setting names a rank that the group does not have.
    """
    shares: dict[int, dict[str, Any]] = settings.get(SETTING)
    beyond = sorted(rank for rank in shares if rank >= dp_size)
    if beyond:
        raise BudgetError(
            f"{SETTING} names DP rank {beyond[0]}",
            f"ranks 0 to {dp_size - 1} (data_parallel_size={dp_size})",
            "Correct it.",
        )
    return shares.get(dp_rank, {})


def apply(share: dict[str, Any], cache_config: Any) -> None:
    """Write the share into a rank's cache configuration, before its workers are made from it."""
    for field, value in share.items():
        setattr(cache_config, field, value)
