"""The V1 model runner asks the TurboQuant backend for the layout of the KV-cache dtype that is configured."""

from patches.framework.records import Patch, Role, Target

_WRAPPERS = "patches.turboquant_kv_spec.wrappers"

PATCH = Patch(
    id="turboquant_kv_spec",
    purpose="Has the V1 model runner ask TurboQuant for the layout of the configured KV-cache dtype, not of 'auto'.",
    fault="With --kv-cache-dtype turboquant_* no worker of the V1 model runner starts: a TurboQuant spec has no"
    " quantisation mode, the runner takes its layers for unquantised and asks the backend for 'auto'.",
    library="vllm",
    releases=">=0.25,<0.27",
    targets=(
        Target(
            "vllm.v1.worker.gpu_model_runner",
            "GPUModelRunner._reshape_kv_cache_tensors",
            f"{_WRAPPERS}:reshape_kv_cache_tensors",
        ),
        Target(
            "vllm.v1.attention.backends.turboquant_attn",
            "TurboQuantAttentionBackend.get_kv_cache_shape",
            f"{_WRAPPERS}:get_kv_cache_shape",
        ),
    ),
    roles=frozenset({Role.WORKER}),
    retires="vLLM 0.27.0 gives TurboQuant specs a quantisation mode of their own.",
    exercised_by="the allocation of the KV cache, while a worker starts",
    unexercised="It is for releases before those that the smoke tests have been run on.",
    upstream=("vllm#47604", "vllm#47609"),
)
