"""Expert and data parallelism for mixture-of-experts models on the CPU backend."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
_WRAPPERS = "patches.cpu_expert_parallel.wrappers"

# Every CPU class that vLLM accepts for expert parallelism (its `_supports_parallel_config` says True).
_CLASSES = (
    "CPUUnquantizedExperts",
    "CPUExpertsFp8",
    "CPUExpertsFp8W8A8",
    "CPUExpertsInt4",
    "CPUExpertsInt8",
    "CPUExpertsMxfp4",
)
_SPREAD = frozenset({Feature.EXPERT_RANKS})

PATCH = Patch(
    id="cpu_expert_parallel",
    purpose="Serves mixture-of-experts models with expert and data parallelism on the CPU backend.",
    fault=(
        "With --data-parallel-size 2 --enable-expert-parallel the first batch kills the stock CPU engine: "
        "CpuCommunicator lacks all_gatherv and reduce_scatterv. With these supplied the experts read global ids as "
        "local ones, out of bounds, and without --enforce-eager the compiler fails on the other ranks' row counts."
    ),
    library="vllm",
    releases=">=0.32",
    targets=(
        *(
            Target(
                _COMMUNICATOR,
                f"CpuCommunicator.{name}",
                f"{_WRAPPERS}:{name}",
                reviewed=("CpuCommunicator",),
                defines=True,
            )
            for name in ("all_gatherv", "reduce_scatterv")
        ),
        *(Target(_EXPERTS, f"{name}.apply", f"{_WRAPPERS}:apply_local_experts") for name in _CLASSES),
        Target(_RUNNER, "MoERunner._select_forward", f"{_WRAPPERS}:select_forward"),
    ),
    roles=frozenset({Role.WORKER}),
    retires="vLLM's CpuCommunicator has both collectives and its CPU experts honour expert_map.",
    exercised_by="every forward pass of a mixture-of-experts model under data or expert parallelism",
    exercises=(
        Exercise(Role.WORKER, ("CpuCommunicator.all_gatherv",), _SPREAD),
        Exercise(Role.WORKER, ("CpuCommunicator.reduce_scatterv",), _SPREAD),
        Exercise(Role.WORKER, tuple(f"{name}.apply" for name in _CLASSES), _SPREAD),
        Exercise(Role.WORKER, ("MoERunner._select_forward",), _SPREAD),
    ),
    condition=f"{_WRAPPERS}:needs_patch",
)
