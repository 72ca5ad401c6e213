"""What the engine core does for the smoke tests, by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from patches.framework.errors import ProbeError
from patches.kv_probe.attention import blocks_needed
from patches.kv_probe.blocks import Groups, borrowed, spans
from patches.kv_probe.chunking import in_blocks, whole
from patches.kv_probe.round_trip import round_trip, state

__all__ = ["PROBES", "run"]


def attention(engine: Any) -> dict[str, Any]:
    """One layer of every attention group of every worker, held against a float32 reference.

    Raises:
        ProbeError: blocks are short.
    """
    counts = [sum(blocks_needed(size)) if size else 0 for size in spans(engine.scheduler.kv_cache_config)]
    if not any(counts):
        return {"skipped": "the engine keeps no KV cache"}
    call = engine.model_executor.collective_rpc

    def wipe(groups: Groups) -> None:
        call("splint_probe", args=("wipe", {"groups": groups}))

    with borrowed(engine, counts, wipe) as groups:
        arguments = {"groups": groups, "seed": random.SystemRandom().getrandbits(32)}
        return {"workers": call("splint_probe", args=("attention", arguments))}


PROBES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "kv_round_trip": round_trip,
    "attention": attention,
    "lmcache": state,
    "prefill_in_blocks": in_blocks,
    "prefill_whole": whole,
}


def run(engine: Any, name: str) -> dict[str, Any]:
    """Run a probe; what it could not do is part of the answer.

    Args:
        engine: vLLM's ``EngineCore``, between two steps.
        name: A key of :data:`PROBES`.

    Returns:
        ``dp_rank`` and what the probe returned, or ``busy`` while requests are running, or ``error`` with what was
        found, wanted and to be done.
    """
    answer = {"dp_rank": engine.vllm_config.parallel_config.data_parallel_index}
    if engine.scheduler.has_unfinished_requests():
        return {**answer, "busy": True}
    try:
        return {**answer, **PROBES[name](engine)}
    except ProbeError as error:
        return {**answer, "error": {"found": error.found, "wanted": error.wanted, "hint": error.remedy}}
