"""What a client says of LMCache, on LMCache's own tracker, connector and scheduler adapter."""

from __future__ import annotations

from typing import Any

import pytest
from support.patching import place_of

from patches.framework.records import Seam
from patches.lmcache_client_params import PATCH, wrappers

pytest.importorskip("lmcache")
pytest.importorskip("vllm")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning"
)  # LMCache's logging

CHUNK = 128
TOKENS = "lmcache.max_offload_tokens"
BAD = ["many", "128", 128.5, -1, True, None, [128], {"n": 1}]


@pytest.fixture(params=["patched", "stock"])
def guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the guards, or with LMCache's own functions in their places."""
    for target in PATCH.targets:
        owner, name = place_of(target)
        found = vars(owner)[name]
        stock = getattr(found, "__wrapped__", found)
        factory = getattr(wrappers, target.wrapper.partition(":")[2])
        patched = factory(Seam(target.name, stock, lambda: None))
        monkeypatch.setattr(owner, name, patched if request.param == "patched" else stock)
    return bool(request.param == "patched")


def asked(transfer: dict[str, Any]) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(extra_args={"kv_transfer_params": transfer})
    return Request(
        request_id="request", pooling_params=None, prompt_token_ids=[5] * 4 * CHUNK, sampling_params=sampling
    )


def stored_tokens(transfer: dict[str, Any]) -> int:
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata, LMCacheMPRequestTracker

    tracker = LMCacheMPRequestTracker(asked(transfer))
    tracker.append_block_ids(([1, 2, 3, 4],))
    tracker.increase_num_scheduled_tokens(4 * CHUNK)
    found = LMCacheMPRequestMetadata.GetStoreMetadata(tracker, CHUNK, [CHUNK])
    return 0 if found is None else found.op.end


@pytest.mark.parametrize("value", BAD)
def test_a_limit_that_is_no_number_of_tokens_is_ignored(guarded: bool, value: Any) -> None:
    if guarded:
        assert stored_tokens({TOKENS: value}) == 4 * CHUNK
    elif isinstance(value, str | list | dict):
        with pytest.raises(TypeError):  # in the engine core's scheduler: the end of the engine
            stored_tokens({TOKENS: value})


@pytest.mark.parametrize("guarded", ["patched"], indirect=True)
@pytest.mark.parametrize(("value", "stored"), [(0, 0), (127, 0), (128, 128), (300, 256), (10_000, 512)])
@pytest.mark.usefixtures("guarded")
def test_a_limit_that_is_one_holds(value: int, stored: int) -> None:
    assert stored_tokens({TOKENS: value}) == stored


@pytest.mark.parametrize("guarded", ["patched"], indirect=True)
@pytest.mark.usefixtures("guarded")
def test_only_plain_values_travel_to_the_server(caplog: pytest.LogCaptureFixture) -> None:
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker

    plain = {"lmcache.tag.team": "red", "lmcache.skip_save": True, "lmcache.share": 0.5, "lmcache.n": -3}
    odd: dict[str, Any] = {"lmcache.deep": {"a": [1]}, "lmcache.none": None, "lmcache.nan": float("nan")}
    assert LMCacheMPRequestTracker(asked({**plain, **odd, "other": 1})).request_configs == plain
    assert LMCacheMPRequestTracker(asked(odd)).request_configs is None
    assert "{'a'" not in caplog.text


def connector() -> Any:
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    class Sessions:
        def cleanup_lookup_result(self, _: str) -> None: ...
        def end_session(self, _: str) -> None: ...

    found = object.__new__(LMCacheMPConnector)
    found.request_trackers, found.lazy_offload, found._can_store = {}, False, True
    found.scheduler_adapter = Sessions()
    return found


def test_statistics_of_a_request_that_never_ran(guarded: bool) -> None:
    """A client that asks for them and goes while its request waits."""
    waited = asked({"cached_token_stats": True})
    if guarded:
        assert connector().request_finished(waited, []) == (True, None)
    else:
        with pytest.raises(AssertionError, match="not found"):
            connector().request_finished(waited, [])


def test_statistics_of_a_request_that_ran(guarded: bool) -> None:
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker

    ran, found = asked({"cached_token_stats": True}), connector()
    found.request_trackers["request"] = LMCacheMPRequestTracker(ran)
    _, told = found.request_finished(ran, [])
    assert told["cached_token_stats"]["num_lmcache_cached_tokens"] == 0, guarded
