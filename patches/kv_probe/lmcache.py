"""One transfer through LMCache's multi-process connector, by its adapters, as the connector itself calls them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from patches.framework.errors import ProbeError
from patches.kv_probe.blocks import Groups

__all__ = [
    "NAME",
    "Transfer",
    "find",
    "finish",
    "load",
    "lookup",
    "poll",
    "scheduler_state",
    "shard",
    "store",
    "wait_for",
    "worker_state",
]

NAME = "LMCacheMPConnector"
IN_PROCESS = "LMCacheConnectorV1"
POLL_S = 0.01
_LOOK = "Look in the logs of the worker and of lmcache server for errors while storing or loading."


@dataclass(frozen=True)
class Transfer:
    """What is moved under which name.

    Attributes:
        request: Id of a request that does not exist; no other request has it.
        tokens: Token ids that the cache keys are made of, a whole number of chunks.
        salt: Keeps the tokens apart from every client's.
    """

    request: str
    tokens: list[int]
    salt: str

    def arguments(self) -> dict[str, Any]:
        """As arguments of a worker's step."""
        return {"request": self.request, "tokens": self.tokens, "salt": self.salt}


def _parts(connector: Any) -> Iterator[Any]:
    """A connector, or those inside a connector of several."""
    yield from getattr(connector, "_connectors", None) or ((connector,) if connector is not None else ())


def find(connector: Any) -> Any:
    """LMCache's multi-process connector in ``connector``, or None."""
    return next((part for part in _parts(connector) if type(part).__name__ == NAME), None)


def _worker_adapter() -> Any:
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group

    connector = find(get_kv_transfer_group()) if has_kv_transfer_group() else None
    return None if connector is None else connector.worker_adapter


def shard(worker: Any) -> int:
    """Which piece of a token's KV this worker holds: ranks that hold the same one (MLA) share the number."""
    adapter = _worker_adapter()
    return int(worker.rank if adapter is None else adapter.parallel_strategy.kv_worker_id)


def _operation(tokens: list[int], groups: Groups) -> Any:
    from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp

    return LoadStoreOp(token_ids=tokens, block_ids=groups, start=0, end=len(tokens))


def store(worker: Any, request: str, tokens: list[int], salt: str, groups: Groups) -> None:
    """Begin to store the blocks."""
    del worker
    adapter = _worker_adapter()
    event = adapter.create_recorded_event()
    adapter.submit_store_request(request, _operation(tokens, groups), event, cache_salt=salt)


def load(worker: Any, request: str, tokens: list[int], salt: str, groups: Groups) -> None:
    """Begin to load into the blocks what :func:`lookup` has found."""
    del worker
    adapter = _worker_adapter()
    event = adapter.create_recorded_event()
    adapter.submit_retrieve_request(request, _operation(tokens, groups), event, cache_salt=salt)


def poll(worker: Any, request: str, direction: str) -> bool | None:
    """Whether the worker's transfer succeeded; None while it is under way.

    Only this transfer's own future is looked at: collecting finished transfers is the scheduler's business.
    """
    del worker
    adapter = _worker_adapter()
    if direction == "store":
        futures, events = adapter.store_futures, adapter.store_events
        if request not in futures:
            return not adapter.is_kv_writer
        future = futures[request]
    else:
        futures, events = adapter.retrieve_futures, adapter.retrieve_events
        if request not in futures:
            _forget_failed(adapter, request, ())
            return False
        future, blocks = futures[request]
    if not future.query():
        return None
    del futures[request]
    events.pop(request, None)
    succeeded = bool(future.result(timeout=0))
    if direction == "load" and not succeeded:
        _forget_failed(adapter, request, blocks)
    return succeeded


def _forget_failed(adapter: Any, request: str, blocks: Sequence[int]) -> None:
    """Leave no word of a failed load: its blocks belong to nobody whom vLLM could tell."""
    adapter.error_block_ids.difference_update(blocks)
    adapter._failed_request_ids.discard(request)
    adapter._dropped_retrieves.discard(request)


def lookup(connector: Any, transfer: Transfer, deadline: float) -> int:
    """How many of the transfer's tokens LMCache holds, ready to be loaded under its request id.

    Args:
        connector: The scheduler's connector.
        transfer: What to look for.
        deadline: ``time.monotonic()`` at which to give up; the answer is 0 then.
    """
    adapter = connector.scheduler_adapter
    adapter.maybe_submit_lookup_request(transfer.request, transfer.tokens, cache_salt=transfer.salt)
    while (found := adapter.check_lookup_result(transfer.request)) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return int(found or 0)


def finish(connector: Any, transfer: Transfer) -> None:
    """End the request that never was, in LMCache and in the scheduler's adapter."""
    adapter = connector.scheduler_adapter
    adapter.cleanup_lookup_result(transfer.request)
    adapter.end_session(transfer.request)


def wait_for(engine: Any, transfer: Transfer, direction: str, deadline: float) -> None:
    """Wait until every worker's transfer has ended well.

    Raises:
        ProbeError: one failed, or is not done at the deadline.
    """
    arguments = {"request": transfer.request, "direction": direction}
    pending: list[int] = []
    while time.monotonic() < deadline:
        results = engine.model_executor.collective_rpc("splint_probe", args=("poll", arguments))
        failed = [rank for rank, result in enumerate(results) if result is False]
        if failed:
            raise ProbeError(f"a failed {direction} on workers {failed}", "a finished one on every worker", _LOOK)
        pending = [rank for rank, result in enumerate(results) if result is None]
        if not pending:
            return
        time.sleep(POLL_S)
    raise ProbeError(f"no end of a {direction} on workers {pending}", "its end within the time limit", _LOOK)


def scheduler_state(connector: Any) -> dict[str, Any]:
    """Health of the scheduler's side of the connector."""
    found = find(connector)
    if found is not None:
        return {"connector": NAME, "healthy": bool(found.scheduler_adapter.is_healthy)}
    return _in_process(connector)


def worker_state(worker: Any) -> dict[str, Any]:
    """Health of the worker's side of the connector."""
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group

    adapter = _worker_adapter()
    if adapter is None:
        return {"rank": worker.rank, **_in_process(get_kv_transfer_group() if has_kv_transfer_group() else None)}
    return {
        "rank": worker.rank,
        "connector": NAME,
        "healthy": bool(adapter.is_healthy),
        "registered_layers": len(adapter.kv_caches),
        "transfer": type(adapter.transfer_ctx).__name__,
    }


def _in_process(connector: Any) -> dict[str, Any]:
    """LMCache inside the engine's own process, which goes on without a cache where it could not start."""
    found = next((part for part in _parts(connector) if type(part).__name__ == IN_PROCESS), None)
    if found is None:
        return {"connector": None}
    manager = found._lmcache_engine._manager
    return {
        "connector": IN_PROCESS,
        "healthy": bool(manager.is_healthy()),
        "reason": manager._init_failed_reason[-300:],
    }
