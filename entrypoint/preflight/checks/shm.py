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
QUEUE_MIB = 240
"""vLLM's queue between an engine and its workers: 10 chunks of 24 MiB. 0.28 and later ask for it to be free."""


def applies(subject: Subject) -> str | None:
    """Workers of the CPU build are processes of their own even where there is one."""
    queue = subject.workers_of_engine > 1 or (subject.vllm is not None and "cpu" in subject.vllm)
    return None if queue or subject.thorough else "no queue between processes"


def run(subject: Subject) -> Evidence:
    del subject
    try:
        found = os.statvfs(PLACE)
    except OSError as error:
        raise CheckFailedError(f"{PLACE}: {error.strerror}", f"{QUEUE_MIB} MiB there", _HINT) from error
    free = found.f_bavail * found.f_frsize // MIB
    evidence = {"free_mib": free, "wanted_mib": QUEUE_MIB}
    if free < QUEUE_MIB:
        raise CheckFailedError(
            f"{free} MiB free in {PLACE}", f"{QUEUE_MIB} MiB for a queue between engine and workers", _HINT, evidence
        )
    return evidence


_HINT = (
    "Docker gives 64 MiB unless told: --shm-size=8g or --ipc=host; in Kubernetes mount an emptyDir of medium Memory."
)

CHECK = Check("shm", "Shared memory holds the queue between engine and workers.", REFUSE, 5.0, applies, run)
