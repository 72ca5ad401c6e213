"""The KV cache of sparse MLA in FP8 is viewed in the layout in which it was allocated."""

from patches.framework.records import Patch, Role, Target

PATCH = Patch(
    id="mla_kv_spec",
    purpose="Says in the KV-cache spec of an fp8_ds_mla layer that it is quantised, so that it is viewed as allocated.",
    fault="With --kv-cache-dtype fp8 (or fp8_ds_mla) on the FlashMLA sparse backend no worker starts: the spec"
    " allocates 656 bytes a token and passes for unquantised, so the cache is viewed with 576. TP, DP and EP alike.",
    library="vllm",
    releases=">=0.25,<0.26",
    targets=(
        Target(
            "vllm.model_executor.layers.attention.mla_attention",
            "MLAAttention.get_kv_cache_spec",
            "patches.mla_kv_spec.wrappers:get_kv_cache_spec",
        ),
    ),
    roles=frozenset({Role.WORKER}),
    retires="vLLM 0.26.0 sets kv_quant_mode in the spec itself.",
    exercised_by="the KV-cache spec of every MLA layer, while a worker starts",
    unexercised="It is for releases before those that the smoke tests have been run on.",
    upstream=("vllm#47722", "vllm#48378", "vllm#48405", "vllm#48896", "vllm#48379"),
)
