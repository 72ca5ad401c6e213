"""An engine's own processes, held together before it reports ready: what the gate does on a node that has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patches.framework import roster
from patches.framework.errors import RosterError
from patches.framework.records import Role

__all__ = ["check_engine"]


def check_engine(vllm_config: Any, dp_rank: int, run_dir: Path) -> None:
    """Compare an engine core's attestation with those of its workers on this node. Linear in workers.

    Args:
        vllm_config: The engine's configuration.
        dp_rank: Its global data-parallel rank.
        run_dir: The node's run directory.

    Raises:
        RosterError: a worker has not attested, is gone, or carries other patches or versions.
    """
    parallel = vllm_config.parallel_config
    expected = [{"role": Role.ENGINE_CORE.value, "dp_rank": dp_rank, "rank": None}]
    if parallel.distributed_executor_backend == "mp":
        expected += [
            {"role": Role.WORKER.value, "dp_rank": dp_rank, "rank": rank} for rank in range(parallel.local_world_size)
        ]
    own = [entry for entry in roster.load(run_dir) if entry["dp_rank"] == dp_rank and entry["role"] in _ROLES]
    problems = roster.compare(expected, own)
    if problems:
        raise RosterError(
            "; ".join(problems),
            f"{len(expected)} processes of the engine DP{dp_rank} with the same patches and versions",
            "Start every process from one image and environment; where VLLM_PLUGINS is set, name vllm_splint in it.",
        )


_ROLES = frozenset({Role.ENGINE_CORE.value, Role.WORKER.value})
