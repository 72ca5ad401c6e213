"""There are file descriptors for the connections."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from entrypoint.preflight.check import WARN, Check, CheckFailedError, Evidence, always

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK"]

RAISED = 65535
"""vLLM raises its soft limit to this, but leaves it as it is where the hard limit is lower."""
WANTED = 4096
"""Each client takes one, each pair of processes some, each cached file one."""


def run(subject: Subject) -> Evidence:
    del subject
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    effective = max(soft, RAISED) if hard == unlimited or hard >= RAISED else soft
    evidence = {"soft": soft, "hard": hard, "effective": effective}
    if soft != unlimited and effective < WANTED:
        raise CheckFailedError(
            f"{effective} file descriptors (vLLM raises no limit where the hard one, {hard}, is below {RAISED})",
            f"{WANTED} or more; {RAISED} is what vLLM asks for",
            f"ulimit -n {RAISED}; docker run --ulimit nofile={RAISED}:{RAISED}.",
            evidence,
        )
    return evidence


CHECK = Check("descriptors", "There are file descriptors for clients and processes.", WARN, 5.0, always, run)
