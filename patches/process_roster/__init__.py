"""Each process of a vLLM server says what it is, so that the gate can prove that none runs without the patches."""

from patches.framework.records import Exercise, Patch, Role, Target

_WRAPPERS = "patches.process_roster.wrappers"

PATCH = Patch(
    id="process_roster",
    purpose="Every process attests its role, ranks, patches and call counters, for the gate and the report.",
    fault="Stock says nowhere which plugin or patch is active in which process; a process without them goes unnoticed.",
    library="vllm",
    releases=">=0.19",
    targets=(
        Target("vllm.entrypoints.launchers.api_server.entry", "run_server_worker", f"{_WRAPPERS}:run_server_worker"),
        Target("vllm.entrypoints.cli.serve", "run_multi_api_server", f"{_WRAPPERS}:launcher"),
        Target("vllm.entrypoints.cli.serve", "run_headless", f"{_WRAPPERS}:headless"),
        Target("vllm.v1.engine.core", "EngineCoreProc.run_engine_core", f"{_WRAPPERS}:run_engine_core"),
        Target("vllm.v1.executor.multiproc_executor", "WorkerProc.worker_main", f"{_WRAPPERS}:worker_main"),
        Target("vllm.v1.engine.coordinator", "DPCoordinatorProc.run_coordinator", f"{_WRAPPERS}:run_coordinator"),
    ),
    roles=frozenset({Role.API_SERVER, Role.LAUNCHER, Role.DP_COORDINATOR, Role.ENGINE_CORE, Role.WORKER}),
    upstream=(),
    retires="vLLM reports active plugins for every process of a server.",
    exercised_by="the start of each process",
    exercises=(
        Exercise(Role.API_SERVER, ("run_server_worker",)),
        Exercise(Role.LAUNCHER, ("run_multi_api_server", "run_headless")),
        Exercise(Role.DP_COORDINATOR, ("DPCoordinatorProc.run_coordinator",)),
        Exercise(Role.ENGINE_CORE, ("EngineCoreProc.run_engine_core",)),
        Exercise(Role.WORKER, ("WorkerProc.worker_main",)),
    ),
)
