"""Where the two numbers meet the memory: before the engine has its plan allocated, and in the worker that measures."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework import process
from patches.framework.records import Seam
from patches.kv_override_check.limits import (
    KVCacheTooLargeError,
    check_bytes,
    check_override,
    planned_bytes,
    worker_name,
)

__all__ = ["initialize_from_config", "measured_by_worker", "measured_by_workers"]

_MEASURED = "_splint_measured_bytes"


def measured_by_workers(seam: Seam) -> Callable[[Any], list[int]]:
    """Keep what the workers of this engine measured, in bytes by worker position."""
    original = seam.original

    @wraps(original)
    def determine_available_memory(self: Any) -> list[int]:
        seam.count()
        measured: list[int] = original(self)
        setattr(self, _MEASURED, list(measured))
        return measured

    return determine_available_memory


def initialize_from_config(seam: Seam) -> Callable[[Any, list[Any]], None]:
    """Hold the planned blocks of each worker against what it measured, before any worker allocates.

    Engines that were not measured, as those that join an elastic group, are left alone.
    """
    original = seam.original

    @wraps(original)
    def initialize(self: Any, kv_cache_configs: list[Any]) -> None:
        seam.count()
        if self.vllm_config.cache_config.num_gpu_blocks_override is not None:
            for worker, (config, there) in enumerate(zip(kv_cache_configs, getattr(self, _MEASURED, ()), strict=False)):
                _refuse_unfit(config, there, worker_name(self.vllm_config.parallel_config, worker))
        original(self, kv_cache_configs)

    return initialize


def _refuse_unfit(config: Any, there: int, name: str) -> None:
    needed = planned_bytes(config.kv_cache_tensors)
    if needed:
        _checked(check_override, config.num_blocks, needed // config.num_blocks, there, name)


def measured_by_worker(seam: Seam) -> Callable[[Any], int]:
    """Hold bytes that were given instead of measured against what is free once the model is there.

    The CPU backend has a method and a check of its own.
    """
    original = seam.original

    @wraps(original)
    def determine_available_memory(self: Any) -> int:
        seam.count()
        available: int = original(self)
        given = self.cache_config.kv_cache_memory_bytes
        if given:
            name = f"{worker_name(self.parallel_config, self.rank)} ({self.device})"
            _checked(check_bytes, given, _free_bytes(self.device), name)
        return available

    return determine_available_memory


def _free_bytes(device: Any) -> int:
    """Free memory of the device, what torch only holds in reserve given back first."""
    import torch
    from vllm.utils.mem_utils import MemorySnapshot

    torch.accelerator.empty_cache()
    return int(MemorySnapshot(device=device).free_memory)


def _checked(check: Callable[..., None], *numbers: Any) -> None:
    try:
        check(*numbers)
    except KVCacheTooLargeError as error:
        process.refuse(error)
