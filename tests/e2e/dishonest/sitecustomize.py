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


def _say() -> None:
    if any("serve" in word for word in sys.orig_argv):
        print(f"dishonest in the matter of {MATTER}", file=sys.stderr, flush=True)


if MATTER:
    _say()
    wrapt.register_post_import_hook(_only, "entrypoint.smoke.checks")
    wrapt.register_post_import_hook(
        lambda module: wrapt.wrap_function_wrapper(module, "write_json", _attested), "patches.framework.rundir"
    )
    if MATTER == "lmcache":
        wrapt.register_post_import_hook(_degraded, "lmcache.integration.vllm.vllm_multi_process_adapter")
