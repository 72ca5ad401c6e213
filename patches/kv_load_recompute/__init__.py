"""A failed KV load recomputes the prompt, unless the operator asked for the request to fail."""

from patches.framework.records import Exercise, Patch, Role, Target

PATCH = Patch(
    id="kv_load_recompute",
    purpose="The default of kv_load_failure_policy is recompute; an explicit value still wins.",
    fault="By default a KV load that fails kills the user's request, although its prompt could be recomputed.",
    library="vllm",
    releases=">=0.32",
    targets=(Target("vllm.config.utils", "config", "patches.kv_load_recompute.wrappers:config"),),
    roles=frozenset({Role.API_SERVER, Role.LAUNCHER, Role.ENGINE_CORE, Role.WORKER}),
    retires="vLLM's default becomes recompute.",
    exercised_by="the import of vLLM's configuration",
    exercises=tuple(
        Exercise(role, ("config",)) for role in (Role.API_SERVER, Role.LAUNCHER, Role.ENGINE_CORE, Role.WORKER)
    ),
)
