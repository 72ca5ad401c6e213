"""Cache keys that say whose bytes they stand for: another format, model, adapter or tenant is a miss."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_WRAPPERS = "patches.lmcache_identity.wrappers"
_MP = "lmcache.integration.vllm.lmcache_mp_connector"
_IN_PROCESS = "lmcache.integration.vllm.vllm_v1_adapter"
_USED = frozenset({Feature.LMCACHE})

PATCH = Patch(
    id="lmcache_identity",
    purpose="Every cache key names the KV format, weights, configuration, adapter and tenant; others are a miss.",
    fault="LMCache's keys hold a torch dtype at most, and that is uint8 for every one-byte KV format: an engine with"
    " fp8_e4m3 takes another's fp8_e5m2 bytes as its own and answers from them, without a word.",
    library="lmcache",
    releases=">=0.5.6",
    targets=(
        Target(
            _MP,
            "get_dcp_decorated_model_name",
            f"{_WRAPPERS}:get_dcp_decorated_model_name",
            reviewed=("get_dcp_decorated_model_name", "LMCacheMPConnector.__init__"),
        ),
        Target(
            "lmcache.integration.vllm.lmcache_mp_metadata",
            "LMCacheMPRequestTracker.__init__",
            f"{_WRAPPERS}:request_tracker",
            reviewed=("LMCacheMPRequestTracker", "LMCacheMPRequestMetadata"),
        ),
        Target(
            _MP,
            "LMCacheMPConnector.on_new_request",
            f"{_WRAPPERS}:on_new_request",
            reviewed=("LMCacheMPConnector.on_new_request", "LMCacheMPConnector.get_num_new_matched_tokens"),
        ),
        Target(_MP, "LMCacheMPConnector.register_kv_caches", f"{_WRAPPERS}:register_kv_caches"),
        Target(
            "lmcache.v1.token_database",
            "TokenDatabase.__init__",
            f"{_WRAPPERS}:token_database",
            reviewed=("TokenDatabase",),
        ),
        Target(_IN_PROCESS, "LMCacheConnectorV1Impl.register_kv_caches", f"{_WRAPPERS}:register_in_process"),
        Target(
            _IN_PROCESS, "LMCacheConnectorV1Impl.get_num_new_matched_tokens", f"{_WRAPPERS}:get_num_new_matched_tokens"
        ),
        Target(
            _IN_PROCESS,
            "RequestTracker.from_new_request",
            f"{_WRAPPERS}:new_in_process_request",
            reviewed=("RequestTracker.from_new_request", "ReqMeta.from_request_tracker", "extract_request_configs"),
        ),
    ),
    roles=frozenset({Role.ENGINE_CORE, Role.WORKER}),
    upstream=("LMCache#2961", "vllm#44250"),
    retires="LMCache's keys hold the KV format, the weights' identity and the adapter.",
    exercised_by="the start of an engine with an LMCache connector, and every request to it",
    exercises=(
        *(Exercise(role, ("get_dcp_decorated_model_name",), _USED) for role in (Role.ENGINE_CORE, Role.WORKER)),
        Exercise(Role.ENGINE_CORE, ("LMCacheMPConnector.on_new_request",), _USED),
        Exercise(Role.ENGINE_CORE, ("LMCacheMPRequestTracker.__init__",), _USED),
        Exercise(Role.WORKER, ("LMCacheMPConnector.register_kv_caches",), _USED),
    ),
)
