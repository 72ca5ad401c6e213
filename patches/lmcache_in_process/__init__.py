"""The in-process connector serves where it is exact; elsewhere the start ends with the reason and what to use."""

from patches.framework.records import Exercise, Patch, Role, Target

PATCH = Patch(
    id="lmcache_in_process",
    purpose="LMCacheConnectorV1 is refused where it can't be exact, before a model is loaded; it says what to use.",
    fault="Since vLLM 0.26 LMCache's in-process connector takes keys and values of the packed KV layout for one another"
    " and overwrites foreign blocks; on the CPU it caches nothing; with hybrid models the start ends with 'failed to"
    " convert the KV cache specs to one unified type'.",
    library="vllm",
    releases=">=0.32",
    targets=(
        Target(
            "vllm.engine.arg_utils",
            "EngineArgs.create_engine_config",
            "patches.lmcache_in_process.wrappers:create_engine_config",
        ),
    ),
    roles=frozenset({Role.API_SERVER, Role.LAUNCHER}),
    upstream=("LMCache#4463", "LMCache#4614", "vllm#42911"),
    retires="LMCache removes its in-process connector, or makes it read the packed layout.",
    exercised_by="the configuration of every engine",
    exercises=tuple(Exercise(role, ("EngineArgs.create_engine_config",)) for role in (Role.API_SERVER, Role.LAUNCHER)),
)
