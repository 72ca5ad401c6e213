"""Memory can be locked for transfers."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from entrypoint.preflight.check import WARN, Check, CheckFailedError, Evidence

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK"]


def applies(subject: Subject) -> str | None:
    """Network adapters lock what they transfer; the CUDA driver locks memory in its own way."""
    if subject.no_gpu is not None:
        return subject.no_gpu
    several_nodes = subject.arguments.has("--data-parallel-address") or subject.arguments.has("--nnodes")
    if subject.arguments.transfer_config or several_nodes or subject.thorough:
        return None
    return "no KV connector and one node"


def run(subject: Subject) -> Evidence:
    del subject
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        raise CheckFailedError(
            f"a limit of {soft // 1024} KiB on locked memory",
            "none: RDMA (NIXL, Mooncake, NCCL over InfiniBand) locks what it transfers",
            "docker run --ulimit memlock=-1; in Kubernetes give the container IPC_LOCK or raise the runtime's limit.",
            {"memlock_bytes": soft},
        )
    return {"memlock_bytes": "unlimited"}


CHECK = Check("memlock", "Network adapters may lock the memory that they transfer.", WARN, 5.0, applies, run)
