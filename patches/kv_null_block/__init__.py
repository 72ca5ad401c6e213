"""The block that vLLM keeps for itself is not counted as room for a request."""

from patches.framework.records import Patch, Role, Target

_PLANNING = "vllm.v1.core.kv_cache_utils"
_WRAPPERS = "patches.kv_null_block.wrappers"

PATCH = Patch(
    id="kv_null_block",
    purpose="Refuses at start a KV cache that holds one request only with the block that vLLM keeps for itself.",
    fault="A KV cache of exactly the blocks that one request of max_model_len needs passes vLLM's check, but one of"
    " them is never handed out: the server starts, and the first request of that length waits at 0 tokens/s for ever,"
    " with every request behind it. max_model_len=auto picks such a length by itself.",
    library="vllm",
    releases=">=0.19,<0.29",
    targets=(
        Target(
            _PLANNING,
            "_check_enough_kv_cache_memory",
            f"{_WRAPPERS}:check_enough_kv_cache_memory",
            reviewed=("_check_enough_kv_cache_memory", "get_kv_cache_configs", "get_kv_cache_config_from_groups"),
        ),
        Target(_PLANNING, "_auto_fit_max_model_len", f"{_WRAPPERS}:auto_fit_max_model_len"),
    ),
    roles=frozenset({Role.ENGINE_CORE}),
    retires="vLLM 0.29.0 reserves the null block in its own check.",
    exercised_by="the planning of the KV cache, while an engine core starts",
    unexercised="It is for releases before those that the smoke tests have been run on.",
    upstream=("vllm#35541", "vllm#41069", "vllm#47272", "vllm#48724"),
)
