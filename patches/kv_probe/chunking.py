"""Prefill in pieces of one block, for a control of what chunking alone does to an answer; and back again."""

from __future__ import annotations

from typing import Any

from patches.framework.errors import ProbeError
from patches.kv_probe.blocks import spans

__all__ = ["in_blocks", "whole"]

_KEPT = "splint_kept_thresholds"


def in_blocks(engine: Any) -> dict[str, Any]:
    """Let no step prefill more than the largest block's tokens of one request, until :func:`whole`.

    Args:
        engine: vLLM's ``EngineCore``, between two steps.

    Raises:
        ProbeError: the scheduler does not chunk prefills.
    """
    scheduler = engine.scheduler
    config = scheduler.scheduler_config
    if not config.enable_chunked_prefill:
        raise ProbeError("chunked prefill is off", "a scheduler that chunks", "There is nothing to compare.")
    vars(scheduler).setdefault(_KEPT, (config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold))
    config.long_prefill_token_threshold = max(spans(scheduler.kv_cache_config))
    scheduler.adaptive_long_prefill_threshold = False
    return {"chunk_tokens": config.long_prefill_token_threshold}


def whole(engine: Any) -> dict[str, Any]:
    """Give the scheduler its own thresholds back; nothing happens where it has them."""
    scheduler = engine.scheduler
    kept = vars(scheduler).pop(_KEPT, None)
    if kept is not None:
        scheduler.scheduler_config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold = kept
    return {"chunk_tokens": scheduler.scheduler_config.long_prefill_token_threshold}
