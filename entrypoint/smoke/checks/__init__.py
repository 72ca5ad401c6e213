"""The battery, in order: what is cheap and what the later checks build on comes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.smoke.checks import (
    attention,
    chat,
    dp_ranks,
    exercised,
    kv_budget,
    kv_round_trip,
    kv_series,
    lmcache,
    logprobs,
    long_prompt,
    models,
    parallel,
    pooling,
    roster,
    stop,
    stream,
)

if TYPE_CHECKING:
    from entrypoint.smoke.check import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    models.CHECK,
    roster.CHECK,
    kv_budget.CHECK,
    kv_round_trip.CHECK,
    attention.CHECK,
    chat.CHECK,
    stream.CHECK,
    logprobs.CHECK,
    stop.CHECK,
    parallel.CHECK,
    long_prompt.CHECK,
    pooling.CHECK,
    dp_ranks.CHECK,
    kv_series.CHECK,
    lmcache.CHECK,
    exercised.CHECK,
)
