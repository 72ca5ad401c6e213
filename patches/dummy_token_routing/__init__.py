"""The profile run's tokens differ from each other, so that every expert-parallel rank measures a share of the load.

What it costs: the ids are drawn once a profile run, in under a millisecond, and nothing is done in any later step. The
measure is of evenly spread tokens from then on. With equal tokens one rank measured the worst case, and its KV cache
paid for that; a real batch that is more uneven than random ids needs memory beyond ``--gpu-memory-utilization``.

The V2 runner takes mixture-of-experts models by default since 0.24; before that it is left alone.
"""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu.model_runner"
_RUN = "GPUModelRunner.profile_run"
_WRAPPERS = "patches.dummy_token_routing.wrappers"

PATCH = Patch(
    id="dummy_token_routing",
    purpose="Draws the token ids of the profile run under data and expert parallelism, so that no rank gets them all.",
    fault=(
        "All token ids of a profile run are 0, and equal tokens have equal experts: the ranks that hold those few "
        "experts compute the tokens of all ranks, the others none. Their KV caches differ many times over, and "
        "VLLM_RANDOMIZE_DP_DUMMY_INPUTS, off by default, is not read by the V2 runner before 0.31."
    ),
    library="vllm",
    releases=">=0.19",
    targets=(
        Target(
            _V1, _RUN, f"{_WRAPPERS}:by_variable", releases="<0.31",
            reviewed=(_RUN, "GPUModelRunner.maybe_randomize_inputs", "GPUModelRunner._dummy_run"),
        ),
        Target(
            _V2, _RUN, f"{_WRAPPERS}:by_own_draw", releases=">=0.24,<0.31",
            reviewed=(_RUN, "GPUModelRunner._dummy_run", "GPUModelRunner.execute_model"),
        ),
        Target(_V1, _RUN, f"{_WRAPPERS}:by_argument", releases=">=0.31"),
        Target(_V2, _RUN, f"{_WRAPPERS}:by_argument", releases=">=0.31"),
    ),
    roles=frozenset({Role.WORKER}),
    retires="vLLM's profile run draws its token ids under expert parallelism by default.",
    exercised_by="the profile run of each worker",
    exercises=(Exercise(Role.WORKER, (_RUN,), frozenset({Feature.PROFILED})),),
    upstream=("vllm#57262",),
)  # fmt: skip
