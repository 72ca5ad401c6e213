"""``/dev/shm`` holds the queues between engine core and workers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, Evidence

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK"]

PLACE = "/dev/shm"  # noqa: S108 - shared memory has no other place
MIB = 1024**2
PER_WORKER_MIB = 256
"""vLLM's queue to the workers keeps 10 chunks of 24 MiB at most; NCCL takes some MiB for each pair of ranks."""


def applies(subject: Subject) -> str | None:
    """One worker of one engine gets its small messages through a small queue."""
    return None if subject.thorough or subject.workers > 1 else "one worker"


def run(subject: Subject) -> Evidence:
    wanted = PER_WORKER_MIB * subject.workers
    try:
        found = os.statvfs(PLACE)
    except OSError as error:
        raise CheckFailedError(f"{PLACE}: {error.strerror}", f"{wanted} MiB there", _HINT) from error
    free = found.f_bavail * found.f_frsize // MIB
    evidence = {"free_mib": free, "wanted_mib": wanted, "workers": subject.workers}
    if free < wanted:
        raise CheckFailedError(
            f"{free} MiB free in {PLACE}", f"{wanted} MiB for {subject.workers} workers", _HINT, evidence
        )
    return evidence


_HINT = (
    "Docker gives 64 MiB unless told: --shm-size=8g or --ipc=host; in Kubernetes mount an emptyDir of medium Memory."
)

CHECK = Check("shm", "Shared memory holds the queues between the processes.", REFUSE, 5.0, applies, run)
