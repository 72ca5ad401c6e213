"""Every OpenAI client can see in ``system_fingerprint`` which patches its answer came through."""

from patches.framework.records import Exercise, Patch, Role, Target

_MODULE = "vllm.entrypoints.serve.utils.fingerprint"

PATCH = Patch(
    id="patch_identity",
    purpose="Adds the identity of the patch set to system_fingerprint; --fingerprint-mode and --fingerprint-value win.",
    fault="system_fingerprint names release, parallelism and configuration; a client can't tell patched from stock.",
    library="vllm",
    releases=">=0.32",
    targets=(
        Target(
            _MODULE,
            "get_system_fingerprint",
            "patches.patch_identity.wrappers:get_system_fingerprint",
            reviewed=("get_system_fingerprint", "set_default_fingerprint_mode", "build_system_fingerprint"),
        ),
    ),
    roles=frozenset({Role.API_SERVER}),
    retires="vLLM names active plugins in system_fingerprint.",
    exercised_by="the start of each API server",
    exercises=(Exercise(Role.API_SERVER, ("get_system_fingerprint",)),),
)
