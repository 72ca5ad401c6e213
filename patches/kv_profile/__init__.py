"""The engine's own description of its KV cache, derived once, the same in scheduler and worker, or no start."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_WRAPPERS = "patches.kv_profile.wrappers"
_EXCHANGING = "patches.kv_profile.exchanging"
_WORKER = "vllm.v1.worker.gpu_worker"
_PLANNING = "vllm.v1.core.kv_cache_utils"
_SCHEDULERS = "generate_scheduler_kv_cache_config"

PATCH = Patch(
    id="kv_profile",
    purpose="Derives what the KV cache is (format, weights, configuration) before workers change it; all must agree.",
    fault="vLLM tells its KV connectors no more of a cache than a torch dtype, which is uint8 for every one-byte"
    " format; the one string that tells them apart is changed by workers while they load the model.",
    library="vllm",
    releases=">=0.32",
    targets=(
        Target("vllm.v1.executor.abstract", "Executor.__init__", f"{_WRAPPERS}:executor"),
        Target("vllm.v1.executor.abstract", "Executor.add_lora", f"{_WRAPPERS}:add_lora"),
        Target("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_worker", f"{_WRAPPERS}:init_worker"),
        Target(
            _PLANNING,
            _SCHEDULERS,
            f"{_WRAPPERS}:scheduler_config",
            reviewed=(_SCHEDULERS, "_project_kv_cache_groups_to_worker"),
            releases="<0.33",
        ),
        # 0.33 moved the projection to another module, where kv_budget reviews it.
        Target(_PLANNING, _SCHEDULERS, f"{_WRAPPERS}:scheduler_config", releases=">=0.33"),
        Target(
            "vllm.distributed.kv_transfer.kv_connector.factory",
            "KVConnectorFactory.create_connector",
            f"{_WRAPPERS}:create_connector",
        ),
        Target("vllm.v1.engine.core", "EngineCore.sleep", f"{_EXCHANGING}:sleep"),
        Target(_WORKER, "Worker.reload_weights", f"{_EXCHANGING}:reload_weights"),
        Target(_WORKER, "Worker.reset_weights", f"{_EXCHANGING}:reset_weights"),
        Target(_WORKER, "Worker.start_weight_update", f"{_EXCHANGING}:start_weight_update"),
        Target(_WORKER, "Worker.start_draft_weight_update", f"{_EXCHANGING}:start_weight_update"),
    ),
    roles=frozenset({Role.ENGINE_CORE, Role.WORKER}),
    retires="vLLM gives connectors an identity of its KV cache, in one form for scheduler and worker.",
    exercised_by="the start of an engine with an LMCache connector",
    exercises=(
        Exercise(Role.ENGINE_CORE, ("Executor.__init__",)),
        Exercise(Role.ENGINE_CORE, (_SCHEDULERS,)),
        Exercise(Role.ENGINE_CORE, ("KVConnectorFactory.create_connector",), frozenset({Feature.LMCACHE})),
        Exercise(Role.WORKER, ("WorkerWrapperBase.init_worker",)),
        Exercise(Role.WORKER, ("KVConnectorFactory.create_connector",), frozenset({Feature.LMCACHE})),
    ),
)
