"""One KV budget for all DP ranks, agreed before anything is allocated; a rank that fails tells the others."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_WRAPPERS = "patches.kv_budget.wrappers"
_CORE = "vllm.v1.engine.core"
_PROJECT = "_project_kv_cache_groups_to_worker"

PATCH = Patch(
    id="kv_budget",
    purpose="All DP ranks agree on one KV budget before they allocate; a rank that fails tells the others why.",
    fault="Each DP rank of an EP group measures and plans by itself: budgets, lengths and graph sizes drift apart, and"
    " when one rank fails during start-up the others hang in a collective without a reason in their logs.",
    library="vllm",
    releases=">=0.32",
    targets=(
        Target(
            _CORE,
            "DPEngineCoreProc._init_data_parallel",
            f"{_WRAPPERS}:init_data_parallel",
            reviewed=("DPEngineCoreProc._init_data_parallel", "DPEngineCoreProc.__init__", "EngineCoreProc.__init__"),
        ),
        Target(_CORE, "EngineCore.__init__", f"{_WRAPPERS}:engine_core"),
        Target(_CORE, "EngineCore._initialize_kv_caches", f"{_WRAPPERS}:initialize_kv_caches"),
        Target(
            "vllm.v1.core.kv_cache_utils",
            "get_kv_cache_configs",
            f"{_WRAPPERS}:get_kv_cache_configs",
            reviewed=(
                "get_kv_cache_configs",
                "get_kv_cache_groups",
                _PROJECT,
                "_pool_bytes_per_block",
                "get_kv_cache_config_from_groups",
            ),
            releases="<0.33",
        ),
        # 0.33 moved the planning, has the engine core group the layers first, and lets platforms place the blocks.
        Target(
            "vllm.v1.core.kv_cache_planning",
            "get_kv_cache_configs",
            f"{_WRAPPERS}:get_kv_cache_configs",
            reviewed=(
                "get_kv_cache_configs",
                "get_global_kv_cache_groups",
                _PROJECT,
                "_pool_bytes_per_block_from_builder",
                "_pool_bytes_per_block",
                "get_kv_cache_config_from_groups",
                "DefaultKVCacheConfigBuilder",
            ),
            releases=">=0.33",
        ),
    ),
    roles=frozenset({Role.ENGINE_CORE}),
    upstream=("vllm#47722", "vllm#46106", "vllm#35478", "vllm#54354"),
    retires="vLLM agrees on one KV budget over the DP group and reports the failure of one rank to the others.",
    exercised_by="the start of every DP engine core; the smoke tests compare the ranks' blocks",
    exercises=(
        Exercise(Role.ENGINE_CORE, ("EngineCore.__init__",)),
        Exercise(Role.ENGINE_CORE, ("EngineCore._initialize_kv_caches",)),
        Exercise(Role.ENGINE_CORE, ("get_kv_cache_configs",)),
        Exercise(Role.ENGINE_CORE, ("DPEngineCoreProc._init_data_parallel",), frozenset({Feature.EXPERT_RANKS})),
    ),
)
