"""Test only: one DP rank fails, or stops, at a stage of its start.

Put this folder on ``PYTHONPATH`` and set ``FAILING_RANK`` to ``STAGE:DP_RANK``. Stages, in the order of a start:
``loading`` and ``measuring`` and ``allocating`` (a worker raises), ``planning`` (the engine core raises), ``silent``
(the engine core stops like a process that hangs) and ``killed`` (it is gone at once), both before it plans.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import wrapt

STAGE, _, RANK = os.environ.get("FAILING_RANK", ":").partition(":")
WORKER = "vllm.v1.worker.cpu_worker"
CORE = "vllm.v1.engine.core"
PLACES = {
    "loading": (WORKER, "CPUWorker.init_device"),
    "measuring": (WORKER, "CPUWorker.determine_available_memory"),
    "allocating": (WORKER, "CPUWorker.compile_or_warm_up_model"),
    "planning": (CORE, "EngineCore._initialize_kv_caches"),
    "silent": (CORE, "EngineCore._initialize_kv_caches"),
    "killed": (CORE, "EngineCore._initialize_kv_caches"),
}


def _act(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Under the patch a method comes as a function with its instance in front.
    instance = args[0] if instance is None else instance
    config = instance.vllm_config
    if config.parallel_config.data_parallel_index != int(RANK):
        return wrapped(*args, **kwargs)
    print(f"rank {RANK} fails while {STAGE} at {time.time()}", flush=True)
    if STAGE in ("silent", "killed"):
        os.kill(os.getpid(), signal.SIGSTOP if STAGE == "silent" else signal.SIGKILL)
    if STAGE == "planning":
        instance.model_executor.get_kv_cache_specs = _raise
        return wrapped(*args, **kwargs)
    return _raise()


def _raise() -> Any:
    raise RuntimeError("injected fault of one rank")


def _hook(module: Any) -> None:
    wrapt.wrap_function_wrapper(module, PLACES[STAGE][1], _act)


if STAGE:
    wrapt.register_post_import_hook(_hook, PLACES[STAGE][0])
