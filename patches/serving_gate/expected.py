"""The roster that an engine's configuration demands, and what the smoke tests need to know of it. Linear in ranks."""

from __future__ import annotations

from typing import Any

from patches.framework.records import Role

__all__ = ["expected_roster", "local_dp_ranks", "served_dp_ranks"]


def local_dp_ranks(parallel: Any) -> tuple[int, ...]:
    """Global data-parallel ranks whose engines this node starts.

    Args:
        parallel: vLLM's ``ParallelConfig`` as the API server holds it.
    """
    if parallel.data_parallel_size == 1:
        return (0,)
    first = parallel.data_parallel_rank if parallel.local_engines_only else 0
    return tuple(range(first, first + parallel.data_parallel_size_local))


def served_dp_ranks(parallel: Any) -> tuple[int, ...]:
    """Global data-parallel ranks that this node's API servers send requests to, those on other nodes included.

    Args:
        parallel: vLLM's ``ParallelConfig`` as the API server holds it.
    """
    if parallel.local_engines_only:
        return local_dp_ranks(parallel)
    return tuple(range(parallel.data_parallel_size))


def expected_roster(config: Any) -> tuple[dict[str, Any], ...]:
    """Every process of this node that must attest.

    Args:
        config: vLLM's ``VllmConfig`` as the API server holds it.

    Returns:
        Entries of ``role``, ``dp_rank`` and ``rank`` (None where the role has none).
    """
    parallel = config.parallel_config
    members = [_member(Role.API_SERVER, rank=index) for index in range(parallel._api_process_count)]
    if parallel._api_process_count > 1:
        members.append(_member(Role.LAUNCHER))
    if config.needs_dp_coordinator and 0 in local_dp_ranks(parallel):
        members.append(_member(Role.DP_COORDINATOR))
    if parallel.data_parallel_backend != "mp":
        return tuple(members)
    for dp_rank in local_dp_ranks(parallel):
        members.append(_member(Role.ENGINE_CORE, dp_rank))
        if parallel.distributed_executor_backend == "mp":
            members += [_member(Role.WORKER, dp_rank, rank) for rank in range(parallel.local_world_size)]
    return tuple(members)


def _member(role: Role, dp_rank: int | None = None, rank: int | None = None) -> dict[str, Any]:
    return {"role": role.value, "dp_rank": dp_rank, "rank": rank}
