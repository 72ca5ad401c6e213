"""The battery, in order: what is cheap and what the later checks build on comes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.smoke.checks import chat, dp_ranks, kv_budget, kv_series, logprobs, models, pooling, roster, stream

if TYPE_CHECKING:
    from entrypoint.smoke.check import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    models.CHECK,
    roster.CHECK,
    kv_budget.CHECK,
    chat.CHECK,
    stream.CHECK,
    logprobs.CHECK,
    pooling.CHECK,
    dp_ranks.CHECK,
    kv_series.CHECK,
)
