"""Nobody else computes on the devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.preflight.check import WARN, Check, CheckFailedError, Evidence, on_gpus

if TYPE_CHECKING:
    from entrypoint.preflight.nvidia import Gpu
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK"]

IDLE_MIB = 1024
"""More than a driver and an idle display take of a GPU; a container does not see whose the rest is."""


def _others(gpu: Gpu) -> str:
    if gpu.processes:
        return ", ".join(f"{name} (pid {pid}, {mib} MiB)" for pid, name, mib in gpu.processes)
    return f"{gpu.used_mib} MiB of processes that are not visible from here" if gpu.used_mib > IDLE_MIB else ""


def run(subject: Subject) -> Evidence:
    found = {f"gpu{gpu.index}": _others(gpu) for gpu in subject.gpus}
    taken = [f"{name}: {others}" for name, others in found.items() if others]
    if taken:
        raise CheckFailedError(
            "; ".join(taken),
            "GPUs of our own",
            "A neighbour that grows while vLLM measures makes ranks unequal or ends them: end it, or pin the budget "
            "with --kv-cache-memory-bytes on every rank.",
            {"used_mib": {f"gpu{gpu.index}": gpu.used_mib for gpu in subject.gpus}},
        )
    return {"used_mib": {f"gpu{gpu.index}": gpu.used_mib for gpu in subject.gpus}}


CHECK = Check("foreign", "No foreign process is on the GPUs.", WARN, 25.0, on_gpus, run)
