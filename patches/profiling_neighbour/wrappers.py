"""The measurement of a profile run, held against what this process can know of itself."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from patches.framework import process, settings
from patches.framework.errors import RefusedError
from patches.framework.records import Seam
from patches.profiling_neighbour.own_memory import Snapshot, Taken, taken

__all__ = ["ProfilingDisturbedError", "memory_profiling"]

logger = logging.getLogger(__name__)

LIMIT = "SPLINT_PROFILING_GROWTH_LIMIT"
GIB = 1 << 30


class ProfilingDisturbedError(RefusedError):
    """A neighbour freed so much memory during profiling that the measurement is worth nothing."""


def memory_profiling(seam: Seam) -> Callable[..., AbstractContextManager[Any]]:
    """Correct the result on leaving, before the worker reads it."""
    original = seam.original

    @contextmanager
    def measured(*args: Any, **kwargs: Any) -> Iterator[Any]:
        seam.count()
        with original(*args, **kwargs) as result:
            yield result
        start = _snapshot(result.before_create)
        own = taken(start, _snapshot(result.before_profile), _snapshot(result.after_profile), result.weights_memory)
        if own is not None:
            _hold_to_limit(result)
            _tell(result, own)
            _correct(result, own)

    return measured


def _snapshot(measured: Any) -> Snapshot:
    return Snapshot(measured.free_memory, measured.torch_memory, measured.non_torch_memory)


def _hold_to_limit(result: Any) -> None:
    before, after = result.before_create, result.after_profile
    growth, share = after.free_memory - before.free_memory, settings.get(LIMIT)
    allowed = int(share * before.total_memory)
    if growth <= allowed:
        return
    process.refuse(
        ProfilingDisturbedError(
            f"free memory on {before.device_} grew from {_gib(before.free_memory)} to {_gib(after.free_memory)} GiB"
            f" while {_who()} loaded and profiled the model: another process gave up {_gib(growth)} GiB and more,"
            f" probably an earlier server that was still ending, or a job beside it ({_processes(before.device_)})",
            f"a growth of at most {_gib(allowed)} GiB ({LIMIT}={share:g} of the device's memory)",
            "Start again when the device's other processes have ended or hold still, give the KV cache's size with"
            f" --kv-cache-memory-bytes, or allow more with {LIMIT}.",
        )
    )


def _tell(result: Any, own: Taken) -> None:
    before, after = result.before_create, result.after_profile
    logger.warning(
        "Another process freed memory on %s while %s profiled: free memory went from %s to %s GiB although this process"
        " took %s GiB or more, so the KV cache is sized from that. Should the neighbour take its memory again, both may"
        " run out: keep --gpu-memory-utilization to this server's share.",
        before.device_,
        _who(),
        _gib(before.free_memory),
        _gib(after.free_memory),
        _gib(own.total),
    )
    current = process.current()
    if current is not None:
        bytes_seen = {"free_before": before.free_memory, "free_after": after.free_memory, "taken": own.total}
        current.note(profiling_disturbed={"device": str(before.device_), **bytes_seen})


def _correct(result: Any, own: Taken) -> None:
    """Put the process's own memory where the worker of the release looks for it.

    Up to 0.26 it adds up torch's peak, the weights and the rest; since 0.27 it takes the drop of free memory.
    """
    result.after_profile.free_memory = result.before_create.free_memory - own.total
    result.non_torch_increase = own.other
    if hasattr(result, "total_consumed"):
        result.total_consumed = own.total
        result.non_kv_cache_memory = own.total + result.transient_peak_headroom


def _who() -> str:
    identity = {} if (current := process.current()) is None else current.identity
    rank, dp_rank = identity.get("rank"), identity.get("dp_rank")
    return f"pid {os.getpid()}" if rank is None else f"DP{dp_rank} worker {rank} (pid {os.getpid()})"


def _processes(device: Any) -> str:
    import torch

    try:
        first, *listed = torch.cuda.list_gpu_processes(device).splitlines()
    except Exception as error:  # noqa: BLE001  (a driver's library fails in its own ways; the refusal counts)
        return f"the driver does not say which: {type(error).__name__}"
    told = ", ".join(" ".join(line.split()) for line in listed)
    return f"now on it: {told}" if told else f"the driver does not say which: {first}"


def _gib(amount: int) -> str:
    return f"{amount / GIB:.2f}"
