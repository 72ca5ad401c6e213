"""Control calls into engine core and workers: the smoke tests reach the KV cache itself, while the gate is closed."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_WRAPPERS = "patches.kv_probe.wrappers"

WHOLE = "prefill_whole"
PROBES = ("kv_round_trip", "attention", "lmcache", "prefill_in_blocks", WHOLE)
"""Names that the engine core's probe answers to; the closed gate has a control call for each."""

PATCH = Patch(
    id="kv_probe",
    purpose="Lets the smoke tests write, store, load and compare bytes in free KV blocks while the gate is closed.",
    fault="Stock has no way to look at the KV cache of a running engine: wrong bytes show only as wrong answers.",
    library="vllm",
    releases=">=0.32",
    targets=(
        Target(
            "vllm.v1.engine.core",
            "EngineCore.splint_probe",
            f"{_WRAPPERS}:engine_core",
            reviewed=("EngineCore.__init__", "EngineCoreProc._handle_client_request"),
            defines=True,
        ),
        Target(
            "vllm.v1.worker.worker_base",
            "WorkerBase.splint_probe",
            f"{_WRAPPERS}:worker",
            reviewed=("WorkerBase.__init__", "WorkerWrapperBase.__getattr__"),
            defines=True,
        ),
    ),
    roles=frozenset({Role.ENGINE_CORE, Role.WORKER}),
    upstream=("vllm#24207",),
    retires="vLLM checks its KV cache and its connector before it reports ready.",
    exercised_by="the smoke checks kv_round_trip and attention",
    exercises=(
        Exercise(Role.ENGINE_CORE, ("EngineCore.splint_probe",), frozenset({Feature.PROBED})),
        Exercise(Role.WORKER, ("WorkerBase.splint_probe",), frozenset({Feature.PROBED})),
    ),
)
