"""A persisted start-up plan belongs to one DP rank, and is applied by all workers of an engine or by none."""

from patches.framework.records import Exercise, Feature, Patch, Role, Target

_MODULE = "vllm.v1.worker.startup_plan"
_WRAPPERS = "patches.startup_plan_rank.wrappers"

PATCH = Patch(
    id="startup_plan_rank",
    purpose="VLLM_ENABLE_STARTUP_PLAN: a plan for each DP rank, applied by all workers of an engine or none, and never"
    " where DP ranks profile together.",
    fault="All DP ranks share one persisted plan, the last writer's; a worker that applies it skips the graph profile,"
    " in whose collectives the workers that do not apply it wait for ever.",
    library="vllm",
    releases=">=0.26",
    targets=(
        Target(_MODULE, "compute_plan_fingerprint", f"{_WRAPPERS}:plan_fingerprint"),
        Target(
            _MODULE,
            "maybe_apply_startup_plan",
            f"{_WRAPPERS}:apply_plan",
            reviewed=("maybe_apply_startup_plan", "maybe_save_startup_plan", "_applicable_kv_cache_memory_bytes"),
        ),
    ),
    roles=frozenset({Role.WORKER}),
    upstream=("vllm#47388",),
    retires="vLLM keys the plan by data-parallel rank and lets all ranks decide alike.",
    exercised_by="the start of each worker on a GPU, before its profile run; VLLM_ENABLE_STARTUP_PLAN=1",
    exercises=(Exercise(Role.WORKER, ("maybe_apply_startup_plan",), frozenset({Feature.PROFILED})),),
)
