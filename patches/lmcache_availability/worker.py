"""The worker: trouble with the server never leaves a forward pass as an exception, and never frees a block early."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from patches.framework.records import Seam
from patches.lmcache_availability.connection import link_of
from patches.lmcache_availability.link import Link, ServerUnavailableError
from patches.lmcache_availability.results import results_of

__all__ = ["handle_preemptions", "poll", "submit_retrieve_request", "submit_store_request"]

logger = logging.getLogger(__name__)

_ANSWERING = threading.Event()
_ANSWERING.set()


def submit_store_request(seam: Seam) -> Callable[..., Any]:
    """A store that fails is a lost store: counted, and said once an outage by the link."""
    original = seam.original

    @wraps(original)
    def store(self: Any, request_id: str, op: Any, *args: Any, **kwargs: Any) -> None:
        seam.count()
        before = self.store_futures.get(request_id)
        with _trouble_ends(link_of(self.req_client)) as trouble:
            original(self, request_id, op, *args, **kwargs)
        if trouble and self.lazy_offload:
            self._completed_store_requests[request_id] = 1
            self._failed_store_requests.add(request_id)
        future = self.store_futures.get(request_id)
        if future is not None and future is not before:
            results_of(self).store_sent(future, op.end - op.start)
        elif self.is_kv_writer:
            results_of(self).store_lost(trouble[0] if trouble else "server_unavailable")

    return store


def submit_retrieve_request(seam: Seam) -> Callable[..., Any]:
    """A load that fails marks its blocks, so that vLLM recomputes them."""
    original = seam.original

    @wraps(original)
    def retrieve(self: Any, request_id: str, op: Any, *args: Any, **kwargs: Any) -> None:
        seam.count()
        link = link_of(self.req_client)
        link.token_bytes = _message_bytes_a_token(self)
        with _trouble_ends(link) as trouble:
            original(self, request_id, op, *args, **kwargs)
        if trouble:
            self.error_block_ids.update(op.flat_block_ids)
            self._failed_request_ids.add(request_id)
            self._dropped_retrieves.add(request_id)
        tokens = op.end - op.start - op.skip_first_n_tokens
        if request_id in self.retrieve_futures:
            results_of(self).load_sent(self.retrieve_futures[request_id][0], tokens)
        else:
            detail = f"{link.url} was not there for a load; its tokens are computed"
            results_of(self).load_failed(tokens, detail)

    return retrieve


def _message_bytes_a_token(adapter: Any) -> float:
    """KV bytes of a token in the answer to a load: those of LMCache's chunk where chunks travel pickled, else 0."""
    context = getattr(adapter.transfer_ctx, "_engine_driven_context", None)
    if context is None or hasattr(context, "_shm"):
        return 0.0
    layout = context.layout_desc
    size = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True))
    return float(size / adapter.lmcache_tokens_per_chunk)


@contextmanager
def _trouble_ends(link: Link) -> Iterator[list[str]]:
    """Catch what an unavailable server makes LMCache raise; the list then holds what it was.

    Around a change of the link's state the transfer context may be half built or the ordering event missing, which
    LMCache reports as RuntimeError. With a settled link such an error is a fault of its own and passes.
    """
    trouble: list[str] = []
    try:
        yield trouble
    except ServerUnavailableError:
        trouble.append("server_unavailable")
    except RuntimeError as error:
        if link.settled():
            raise
        logger.warning("A transfer failed while the connection to the LMCache server changed: %s", error)
        trouble.append("connection_changed")


def poll(seam: Seam) -> Callable[..., Any]:
    """Collect finished transfers; only an answer, or the proof that the server is gone, ends one.

    Stock drops every pending transfer as soon as the server is called unhealthy, and vLLM then reuses blocks that a
    merely silent server may still read or write (``lmcache_driven`` mode). Here such a transfer stays pending until
    the server has answered, or its connection has broken and the server with it: then a store is lost and a load is
    recomputed. Where the worker copies itself (``engine_driven``), every wait is bounded and nothing stays pending.
    """
    original = seam.original

    @wraps(original)
    def finished(self: Any, *args: Any, **kwargs: Any) -> tuple[set[str] | None, set[str] | None]:
        seam.count()
        results_of(self).collect()
        if self.is_healthy:
            try:
                return original(self, *args, **kwargs)  # type: ignore[no-any-return]
            except ServerUnavailableError:
                logger.debug("the connection was lost between two looks at the pending transfers")
        if not _disconnects_show(self.req_client):
            return original(self, *args, **kwargs)  # type: ignore[no-any-return]
        _settle_lost(self)
        with _seen_as_answering(self):
            sent, received = original(self, *args, **kwargs)
        # Like stock's own unhealthy branch: vLLM deletes the request at the first of the two reports.
        return (sent - received if sent and received else sent), received

    return finished


def handle_preemptions(seam: Seam) -> Callable[..., None]:
    """Before a preempted request's blocks are written by others, wait until no store reads them any more.

    Stock does not wait for a server that is called unhealthy, and for 300 s at most for another: one that is merely
    silent then reads what was written meanwhile, and keeps it under the preempted request's keys.
    """
    original = seam.original

    @wraps(original)
    def preempted(self: Any, need_flush_before_forward: bool) -> None:
        seam.count()
        if need_flush_before_forward:
            results_of(self).await_reads(link_of(self.req_client).url)
        with _seen_as_answering(self):
            original(self, need_flush_before_forward)

    return preempted


def _disconnects_show(client: Any) -> bool:
    """Whether a broken connection is noticed: with ZMQ, not with gRPC, where stock's behaviour is kept."""
    return hasattr(client, "_message_queue_client")


@contextmanager
def _seen_as_answering(adapter: Any) -> Iterator[None]:
    """Let LMCache look at each transfer by itself, as it does while the server is well."""
    health, adapter._health_event = adapter._health_event, _ANSWERING
    try:
        yield
    finally:
        adapter._health_event = health


def _settle_lost(adapter: Any) -> None:
    """Turn transfers whose connection broke into failed ones: the server can't touch their blocks any more."""
    for request_id, future in adapter.store_futures.items():
        if _lost(future):
            adapter.store_futures[request_id] = _failed()
    for request_id, (future, block_ids) in adapter.retrieve_futures.items():
        if _lost(future):
            adapter.retrieve_futures[request_id] = (_failed(), block_ids)


def _lost(future: Any) -> bool:
    return isinstance(getattr(future, "raw_future_", future).exception_, ServerUnavailableError)


def _failed() -> Any:
    from lmcache.v1.multiprocess.futures import MessagingFuture

    future: Any = MessagingFuture()
    future.set_result(False)
    return future
