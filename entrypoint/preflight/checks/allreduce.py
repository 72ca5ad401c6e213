"""The processes of this node can add up numbers together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, Evidence
from entrypoint.preflight.isolated import probe

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK"]

LIMIT_S = 180.0
"""Most of it for reading torch from a slow disk the first time."""
MOST_PROCESSES = 8
_HINT = {
    "nccl": "Run it with NCCL_DEBUG=INFO; look at /dev/shm, peer access (NCCL_P2P_DISABLE=1 to try) and GPU topology.",
    "gloo": "Does this host's name resolve to an address of its own? Else set GLOO_SOCKET_IFNAME.",
}


def _backend(subject: Subject) -> tuple[str, int]:
    if subject.gpus:
        return "nccl", len(subject.gpus)
    return "gloo", min(max(subject.workers, 2), MOST_PROCESSES)


def applies(subject: Subject) -> str | None:
    """A server of one worker has nobody to add up with; the check of a machine has."""
    backend, world = _backend(subject)
    if backend == "nccl" and world == 1:
        return "one GPU"
    return None if subject.thorough or subject.workers > 1 else "one worker"


def run(subject: Subject) -> Evidence:
    backend, world = _backend(subject)
    hint = _HINT[backend]
    found = probe("allreduce", backend, str(world), limit_s=LIMIT_S, environ=subject.environ, hint=hint)
    if found["wrong"]:
        raise CheckFailedError(f"wrong sums on rank(s) {found['wrong']}", "exact sums of whole numbers", hint, found)
    return found


CHECK = Check(
    "allreduce",
    "An all-reduce of whole numbers is exact: over the GPUs with NCCL, without GPUs among processes with gloo.",
    REFUSE,
    LIMIT_S + 10,
    applies,
    run,
)
