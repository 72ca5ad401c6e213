"""The profile run sends its tokens to the experts, as traffic will, so that their memory is measured."""

from patches.framework.records import Patch, Role, Target

_RUNNER = "vllm.v1.worker.gpu.model_runner"
_BATCH = "vllm.v1.worker.gpu.input_batch"
_WRAPPERS = "patches.profile_routing.wrappers"

PATCH = Patch(
    id="profile_routing",
    purpose="Lets the V2 runner's profile run route its tokens to the experts, so that their memory is measured.",
    fault=(
        "The V2 runner marks every token of a dummy batch as padding, and the routers send padding to no expert "
        "(VLLM_MOE_SKIP_PADDING, on by default since 0.27). The profile run measures a model without experts, the KV "
        "cache takes the memory that they need, and the server runs out of memory under load."
    ),
    library="vllm",
    releases=">=0.25,<0.31",
    targets=(
        Target(_RUNNER, "GPUModelRunner._dummy_run", f"{_WRAPPERS}:dummy_run"),
        Target(_BATCH, "InputBatch.make_dummy", f"{_WRAPPERS}:make_dummy"),
    ),
    roles=frozenset({Role.WORKER}),
    retires="vLLM 0.31 marks the tokens of a dummy batch as padding outside profile runs only.",
    exercised_by="the profile run of each worker with the V2 runner",
    unexercised="It is for releases before those that the smoke tests have been run on.",
    upstream=("vllm#57270",),
)
