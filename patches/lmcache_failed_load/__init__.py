"""After a failed load LMCache stores what the request computes, and only once it has computed it."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector"
_METADATA = "lmcache.integration.vllm.lmcache_mp_metadata"
_WRAPPERS = "patches.lmcache_failed_load.wrappers"

PATCH = Patch(
    id="lmcache_failed_load",
    purpose="After a failed load LMCache stores what the request computes, and not before it has computed it.",
    fault="LMCache counts the tokens of a hit as computed and stored even if their load fails. Where vLLM's own prefix"
    " cache has the start of such a prompt, they are not stored again, and the chunk behind them may be stored before"
    " it is computed: whoever loads it gets wrong KV under the right key.",
    library="lmcache",
    releases=">=0.5.6",
    targets=(
        Target(
            _CONNECTOR,
            "LMCacheMPConnector._process_new_requests",
            f"{_WRAPPERS}:process_new_requests",
            reviewed=("LMCacheMPConnector._process_new_requests", "LMCacheMPConnector.get_num_new_matched_tokens"),
        ),
        Target(_CONNECTOR, "LMCacheMPConnector._process_cached_requests", f"{_WRAPPERS}:process_cached_requests"),
        Target(
            _METADATA,
            "LMCacheMPRequestMetadata.GetStoreMetadata",
            f"{_WRAPPERS}:get_store_metadata",
            reviewed=("LMCacheMPRequestMetadata.GetStoreMetadata", "LMCacheMPRequestTracker"),
        ),
    ),
    roles=frozenset({Role.ENGINE_CORE}),
    retires="LMCache takes the number of computed tokens from vLLM, or corrects its own when a load fails.",
    exercised_by="every step of an engine with an LMCache connector that stores",
    exercises=(
        Exercise(
            Role.ENGINE_CORE,
            ("LMCacheMPRequestMetadata.GetStoreMetadata",),
            frozenset({Feature.LMCACHE, Feature.PROBED}),
        ),
    ),
)
