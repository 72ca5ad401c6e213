"""Where LMCache reads a client's parameters: values that it can't work with never get in."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework import tallies
from patches.framework.records import Seam

__all__ = ["extract_request_configs", "request_finished"]

logger = logging.getLogger(__name__)

TOKENS = "lmcache.max_offload_tokens"
STATISTICS = "cached_token_stats"


def extract_request_configs(seam: Seam) -> Callable[..., dict[str, Any] | None]:
    """The client's ``lmcache.*`` parameters, without those that nothing can be done with.

    They travel in every key to the LMCache server, so they are plain values (vLLM has bounded integers to 64 bits), and
    a number of tokens is one.
    """
    original = seam.original

    @wraps(original)
    def extract(sampling_params: object) -> dict[str, Any] | None:
        seam.count()
        given = original(sampling_params)
        if given is None:
            return None
        kept = {name: value for name, value in given.items() if _fits(name, value)}
        if len(kept) < len(given):
            _say(sorted(given.keys() - kept.keys()))
        return kept or None

    return extract


def _fits(name: str, value: Any) -> bool:
    if name == TOKENS:
        return type(value) is int and value >= 0
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int)


def _say(names: list[str]) -> None:
    count = tallies.due("client parameters", 1)
    if count:
        known = TOKENS if TOKENS in names else "a parameter"
        logger.warning(
            "Ignored kv_transfer_params of %d request(s): %s is not what LMCache takes (%s: a whole number from 0;"
            " others: text, number, true or false).",
            count,
            known,
            TOKENS,
        )


def request_finished(seam: Seam) -> Callable[..., Any]:
    """A request that never ran has no statistics: whoever asked for them gets none."""
    original = seam.original

    @wraps(original)
    def finished(self: Any, request: Any, block_ids: list[int]) -> Any:
        seam.count()
        asked = request.kv_transfer_params
        if asked and STATISTICS in asked and request.request_id not in self.request_trackers:
            request.kv_transfer_params = {name: value for name, value in asked.items() if name != STATISTICS}
        return original(self, request, block_ids)

    return finished
