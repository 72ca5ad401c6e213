"""What a client says about LMCache in its request can't end the engine."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_WRAPPERS = "patches.lmcache_client_params.wrappers"

PATCH = Patch(
    id="lmcache_client_params",
    purpose="A client's kv_transfer_params for LMCache are checked; what does not fit is ignored and logged.",
    fault="The scheduler computes with a client's lmcache.max_offload_tokens as it is, and looks for the request in a"
    " table where a request that never ran is missing: a text, or an early disconnect, ends the engine for everybody.",
    library="lmcache",
    releases=">=0.5.6",
    targets=(
        Target(
            "lmcache.integration.vllm.utils",
            "extract_request_configs_from_sampling_params",
            f"{_WRAPPERS}:extract_request_configs",
        ),
        Target(
            "lmcache.integration.vllm.lmcache_mp_connector",
            "LMCacheMPConnector.request_finished",
            f"{_WRAPPERS}:request_finished",
            reviewed=("LMCacheMPConnector.request_finished", "LMCacheMPConnector._get_request_tracker"),
        ),
    ),
    roles=frozenset({Role.ENGINE_CORE}),
    retires="LMCache checks what it takes from kv_transfer_params.",
    exercised_by="every request of an engine with an LMCache connector",
    exercises=(
        Exercise(Role.ENGINE_CORE, ("extract_request_configs_from_sampling_params",), frozenset({Feature.LMCACHE})),
    ),
)
