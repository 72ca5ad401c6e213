"""What LMCache stores of a request whose load failed, on LMCache's own connector and trackers."""

from __future__ import annotations

from typing import Any

import pytest
from support.patching import place_of

from patches.framework.records import Seam
from patches.lmcache_failed_load import PATCH, wrappers

pytest.importorskip("lmcache")
pytest.importorskip("vllm")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning"
)  # LMCache's logging

CHUNK = 128
PROMPT = 11 * CHUNK - 8
HIT = 7 * CHUNK
STEP = 900
"""Tokens that a step computes: from one block, not to the end of one."""


@pytest.fixture(params=["patched", "stock"])
def guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the guards, or with LMCache's own functions in their places."""
    for target in PATCH.targets:
        owner, name = place_of(target)
        found = vars(owner)[name]
        call = found.__func__ if isinstance(found, staticmethod) else found
        chosen = getattr(call, "__wrapped__", call)
        if request.param == "patched":
            chosen = getattr(wrappers, target.wrapper.partition(":")[2])(Seam(target.name, chosen, lambda: None))
        monkeypatch.setattr(owner, name, staticmethod(chosen) if isinstance(found, staticmethod) else chosen)
    return bool(request.param == "patched")


class Adapter:
    """Of the scheduler's adapter: a server that has the first ``HIT`` tokens of every prompt."""

    lmcache_tokens_per_chunk = CHUNK

    def maybe_submit_lookup_request(self, *_: Any, **__: Any) -> None: ...
    def cleanup_lookup_result(self, _: str) -> None: ...
    def free_lookup_locks(self, **_: Any) -> None: ...

    def check_lookup_result(self, _: str) -> int:
        return HIT


class Blocks:
    """Blocks of a request as vLLM hands them to a connector."""

    def __init__(self, tokens: int) -> None:
        self.count = -(-tokens // CHUNK)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([*range(1, 1 + self.count)],)


def connector() -> Any:
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from lmcache.integration.vllm.lmcache_mp_metrics import LMCacheMPConnectorStats

    found = object.__new__(LMCacheMPConnector)
    found.request_trackers, found.lazy_offload, found._can_store, found._save_decode_cache = {}, False, True, False
    found._reserve_last_token_for_lookup, found._hit_alignment_tokens = False, CHUNK
    found._group_tokens_per_block, found._connector_stats = [CHUNK], LMCacheMPConnectorStats()
    found.scheduler_adapter = Adapter()
    return found


class Engine:
    """One request of vLLM's scheduler, as far as it shows in what the connector is told."""

    def __init__(self, local: int, tokens: int = PROMPT) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.request = Request(
            request_id="request",
            pooling_params=None,
            prompt_token_ids=[5] * tokens,
            sampling_params=SamplingParams(),
        )
        self.connector = connector()
        self.computed = local
        self.allocated = 0
        self.new = True

    def load(self, *, arrives: bool) -> None:
        """Look up what the prefix cache does not have, and load it; a load that fails leaves what was there before."""
        from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPConnectorMetadata

        external, asynchronous = self.connector.get_num_new_matched_tokens(self.request, self.computed)
        assert asynchronous
        self.allocate(self.computed + external, external)
        self.connector._process_retrieve_requests(LMCacheMPConnectorMetadata())
        self.request.num_computed_tokens = self.computed = self.computed + external if arrives else self.computed
        if self.computed == 0:  # vLLM has given all blocks back, and asks again
            assert self.connector.get_num_new_matched_tokens(self.request, 0) == (0, False)
            self.allocated = 0

    def allocate(self, tokens: int, external: int = 0) -> None:
        self.connector.update_state_after_alloc(self.request, Blocks(tokens), external)
        self.allocated = max(self.allocated, tokens)

    def step(self, tokens: int = STEP) -> tuple[int, int] | None:
        """Schedule up to ``tokens`` of the prompt; returns the range that LMCache is to store after the step."""
        from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPConnectorMetadata
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        tokens = min(tokens, self.request.num_tokens - self.computed)
        told = SchedulerOutput.make_empty()
        told.num_scheduled_tokens = {"request": tokens}
        metadata = LMCacheMPConnectorMetadata()
        if self.new:
            self.allocate(self.computed + tokens)
            told.scheduled_new_reqs = [
                NewRequestData("request", None, [], None, None, ([],), self.computed, None),
            ]
            self.connector._process_new_requests(told, metadata)
        else:
            before = Blocks(self.allocated).count
            added = [*range(1 + before, 1 + Blocks(self.computed + tokens).count)]
            told.scheduled_cached_reqs = CachedRequestData(["request"], set(), [], {}, [(added,)], [self.computed], [0])
            self.connector._process_cached_requests(told, metadata)
        self.new = False
        self.computed += tokens
        self.allocated = max(self.allocated, self.computed)
        return next(((entry.op.start, entry.op.end) for entry in metadata.requests), None)


def test_after_a_failed_load_what_is_computed_is_stored_and_nothing_else(guarded: bool) -> None:
    """vLLM has the first chunk, LMCache the first seven, and the load of the other six fails."""
    engine = Engine(CHUNK)
    engine.load(arrives=False)
    stored = engine.step()
    assert engine.computed == CHUNK + STEP
    if guarded:
        assert stored == (CHUNK, 8 * CHUNK)
        assert engine.step() == (8 * CHUNK, 10 * CHUNK)
    else:
        assert stored == (HIT, 9 * CHUNK), "its last 124 tokens are still to be computed"


@pytest.mark.parametrize("steps", [(100, 100, 900, 900), (896, 128, 1, 900), (900, 900)])
@pytest.mark.parametrize("local", [0, CHUNK, 3 * CHUNK])
@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("guarded", ["patched"], indirect=True)
@pytest.mark.usefixtures("guarded")
def test_every_whole_chunk_is_stored_once_it_is_computed(steps: tuple[int, ...], local: int, arrives: bool) -> None:
    engine = Engine(local)
    engine.load(arrives=arrives)
    begun = end = engine.computed
    for tokens in steps:
        stored = engine.step(tokens)
        if stored is not None:
            assert stored[0] == end
            end = stored[1]
        assert end == max(begun, min(engine.computed, PROMPT) // CHUNK * CHUNK)


@pytest.mark.parametrize("guarded", ["patched"], indirect=True)
@pytest.mark.usefixtures("guarded")
def test_a_prompt_that_is_all_hit_is_not_stored_again() -> None:
    """vLLM computes its last token all the same."""
    engine = Engine(0, tokens=HIT)
    engine.load(arrives=True)
    assert engine.computed == HIT - 1
    assert engine.step() is None


def test_a_failed_load_whose_start_another_request_has_computed_meanwhile(guarded: bool) -> None:
    """All blocks were given back; the second try finds four chunks in vLLM's prefix cache."""
    engine = Engine(0)
    engine.load(arrives=False)
    engine.computed = 4 * CHUNK
    assert engine.step() == (0, 10 * CHUNK if guarded else 6 * CHUNK)
