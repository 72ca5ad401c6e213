"""Nothing is served until the smoke tests have passed on the running server."""

from patches.framework.records import Exercise, Patch, Role, Target

PATCH = Patch(
    id="serving_gate",
    purpose="Answers 503 on every path until the smoke tests have passed; ends the server when they fail.",
    fault="Stock answers /health with 200 as soon as it listens, before a single token was checked.",
    library="vllm",
    releases=">=0.19",
    targets=(Target("vllm.entrypoints.launchers.launcher", "serve_http", "patches.serving_gate.wrappers:serve_http"),),
    roles=frozenset({Role.API_SERVER}),
    upstream=("vllm#24207", "vllm#36960", "vllm#50282"),
    retires="vLLM gates readiness on a check of generation and KV cache.",
    exercised_by="the start of each API server",
    exercises=(Exercise(Role.API_SERVER, ("serve_http",)),),
)
