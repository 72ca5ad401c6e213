"""A short first prompt must not kill a CPU worker that uses AMX."""

from patches.framework.records import Exercise, Patch, Role, Target

PATCH = Patch(
    id="cpu_amx_permission",
    purpose="Asks the kernel for the AMX tile permission when a CPU worker starts, before its first forward pass.",
    fault=(
        "On a CPU with AMX, a first prompt of 1 to 3 tokens kills the stock worker with SIGILL in the attention "
        "kernel: nothing has asked for the permission yet. An idle data-parallel rank's dummy batch is such a prompt."
    ),
    library="vllm",
    releases=">=0.32",
    targets=(
        Target("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", "patches.cpu_amx_permission.wrappers:init_device"),
    ),
    roles=frozenset({Role.WORKER}),
    retires="vLLM asks for the permission when its CPU worker starts.",
    exercised_by="the start of each CPU worker",
    exercises=(Exercise(Role.WORKER, ("CPUWorker.init_device",)),),
    condition="patches.cpu_amx_permission.wrappers:needs_permission",
)
