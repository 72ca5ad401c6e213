"""Test only: a server that is dishonest in one matter, and smoke tests of which only the one for that matter runs.

Put this folder on ``PYTHONPATH``. ``DISHONEST`` names the smoke check whose matter it is. What clients see is falsified
by :mod:`falsified` (``--middleware falsified.Falsified``), what processes attest and do in here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import wrapt

MATTER = os.environ.get("DISHONEST", "")


def _only(module: Any) -> None:
    module.CHECKS = tuple(check for check in module.CHECKS if check.id == MATTER)


def _attested(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a process writes into the roster: left out, or with other numbers."""
    del instance
    path, data = args
    if Path(path).parent.name == "roster":
        if MATTER == "roster" and data["role"] == "dp_coordinator":
            return None
        if MATTER == "exercised" and data["role"] == "engine_core":
            data = {**data, "seams": []}
        if MATTER == "kv_budget" and data["role"] == "engine_core" and data["dp_rank"] == 1:
            data = {**data, "facts": _one_block_less(data["facts"])}
    return wrapped(path, data, **kwargs)


def _one_block_less(facts: dict[str, Any]) -> dict[str, Any]:
    budget = facts.get("kv_budget", {})
    own = [{**rank, "blocks": rank["blocks"] - 1} if "blocks" in rank else rank for rank in budget.get("own", [])]
    return {**facts, "kv_budget": {**budget, "own": own}} if budget else facts


def _degraded(module: Any) -> None:
    module.LMCacheMPWorkerAdapter.is_healthy = property(lambda _adapter: False)


def _misloaded(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One bit flips in the first block that comes back from LMCache."""
    del instance
    import torch

    future = wrapped(*args, **kwargs)
    caches, blocks = args[2], args[3]
    cache = next(iter(caches.values()))
    bits = cache.view({1: torch.uint8, 2: torch.int16}[cache.element_size()])
    bits[blocks[0][0], 0, 0, 0] ^= 1
    return future


def _miswritten(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Values go into the KV cache one token late."""
    del instance
    layer, key, value, *rest = args
    return wrapped(layer, key, value.roll(1, 0), *rest, **kwargs)


INSIDE = {
    "kv_round_trip": (
        "lmcache.v1.multiprocess.transfer_context.worker_transfer",
        "EngineDrivenTransferContext.submit_retrieve",
        _misloaded,
    ),
    "attention": (
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackendImpl.do_kv_cache_update",
        _miswritten,
    ),
}
"""Dishonesties inside a worker: module, function, and what takes its place."""


def _replace(module_name: str, function: str, wrapper: Any) -> None:
    wrapt.register_post_import_hook(lambda module: wrapt.wrap_function_wrapper(module, function, wrapper), module_name)


def _say() -> None:
    if any("serve" in word for word in sys.orig_argv):
        print(f"dishonest in the matter of {MATTER}", file=sys.stderr, flush=True)


if MATTER:
    _say()
    wrapt.register_post_import_hook(_only, "entrypoint.smoke.checks")
    wrapt.register_post_import_hook(
        lambda module: wrapt.wrap_function_wrapper(module, "write_json", _attested), "patches.framework.rundir"
    )
    if MATTER in INSIDE:
        _replace(*INSIDE[MATTER])
    if MATTER == "lmcache":
        wrapt.register_post_import_hook(_degraded, "lmcache.integration.vllm.vllm_multi_process_adapter")
