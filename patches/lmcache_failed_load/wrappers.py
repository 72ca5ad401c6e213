"""Where LMCache decides what to store: it goes by vLLM's count of computed tokens instead of by its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework.records import Seam

__all__ = ["get_store_metadata", "process_cached_requests", "process_new_requests"]

_COMPUTED = "splint_computed"


def process_new_requests(seam: Seam) -> Callable[..., None]:
    """Note how far vLLM has computed each request that is scheduled for the first time."""
    original = seam.original

    @wraps(original)
    def process(self: Any, scheduler_output: Any, metadata: Any) -> None:
        seam.count()
        for request in scheduler_output.scheduled_new_reqs:
            _note(self, scheduler_output, request.req_id, request.num_computed_tokens)
        original(self, scheduler_output, metadata)

    return process


def process_cached_requests(seam: Seam) -> Callable[..., None]:
    """The same for requests that were scheduled before."""
    original = seam.original

    @wraps(original)
    def process(self: Any, scheduler_output: Any, metadata: Any) -> None:
        seam.count()
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            _note(self, scheduler_output, request_id, computed)
        original(self, scheduler_output, metadata)

    return process


def _note(connector: Any, scheduler_output: Any, request_id: str, computed: int) -> None:
    """Note the tokens that are computed before this step, and when it has ended; a store comes after that."""
    tracker = connector.request_trackers.get(request_id)
    if tracker is not None:
        setattr(tracker, _COMPUTED, (computed, computed + scheduler_output.num_scheduled_tokens[request_id]))


def get_store_metadata(seam: Seam) -> Callable[..., Any]:
    """Correct LMCache's own counts before it decides.

    They are the tokens of the hit and those scheduled since. After a failed load vLLM has fewer: it goes on behind what
    its own prefix cache had. LMCache then takes tokens for computed that are still to come, and for stored those that
    did not arrive.
    """
    original = seam.original

    @wraps(original)
    def decide(tracker: Any, lmcache_tokens_per_chunk: int, *args: Any, **kwargs: Any) -> Any:
        seam.count()
        before, after = vars(tracker).get(_COMPUTED, (None, None))
        if before is not None:
            tracker.num_scheduled_tokens = after - max(tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens)
            # A full hit lacks its last token, which vLLM computes to have something to sample from.
            if tracker.num_stored_tokens == tracker.num_lmcache_hit_tokens > before + 1:
                tracker.num_stored_tokens = before // lmcache_tokens_per_chunk * lmcache_tokens_per_chunk
        return original(tracker, lmcache_tokens_per_chunk, *args, **kwargs)

    return decide
