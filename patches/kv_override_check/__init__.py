"""KV cache that is asked for by number is held against what the device has, before anything is allocated."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_EXECUTOR = "vllm.v1.executor.abstract"
_WRAPPERS = "patches.kv_override_check.wrappers"

PATCH = Patch(
    id="kv_override_check",
    purpose="Refuses a KV cache given in blocks or bytes that a worker's device can't hold, and says which one.",
    fault=(
        "--num-gpu-blocks-override replaces what the workers measured before vLLM checks it, and "
        "--kv-cache-memory-bytes is taken as it stands: a rank with less memory than the others plans what it does not "
        "have, and runs out of memory at the allocation, while the others wait for it."
    ),
    library="vllm",
    releases=">=0.19",
    targets=(
        Target(_EXECUTOR, "Executor.determine_available_memory", f"{_WRAPPERS}:measured_by_workers"),
        Target(_EXECUTOR, "Executor.initialize_from_config", f"{_WRAPPERS}:initialize_from_config"),
        Target("vllm.v1.worker.gpu_worker", "Worker.determine_available_memory", f"{_WRAPPERS}:measured_by_worker"),
    ),
    roles=frozenset({Role.ENGINE_CORE, Role.WORKER}),
    retires="vLLM checks both numbers against the memory of each worker.",
    exercised_by="the start of each engine core, and of each worker on a GPU",
    exercises=(
        Exercise(Role.ENGINE_CORE, ("Executor.initialize_from_config",)),
        Exercise(Role.WORKER, ("Worker.determine_available_memory",), frozenset({Feature.PROFILED})),
    ),
    upstream=("vllm#22234",),
)
