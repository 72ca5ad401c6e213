"""What becomes of LMCacheConnectorV1, asked of vLLM's own configuration of each model.

``python -m support.in_process_configs FOLDER`` (with the patch on) prints the answers as JSON, by the value of
SPLINT_LMCACHE_IN_PROCESS and by case.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from patches.framework.errors import SplintError
from patches.lmcache_in_process.wrappers import SETTING, cache_of
from support.model_configs import CONFIGS, write

__all__ = ["CASES"]

V1 = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
MP = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
BOTH = {
    "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [V1, MP]},
}  # fmt: skip
HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 256, "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 512, "torch_dtype": "bfloat16", "max_position_embeddings": 2048,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "dense": {"name": "llama-3.2-1b", "kv_transfer_config": V1},
    "latent": {"name": "deepseek-v2-lite", "kv_transfer_config": V1},
    "sparse": {"name": "deepseek-v3.2", "kv_transfer_config": V1},
    "hybrid": {"name": "hybrid", "kv_transfer_config": V1},
    "inside another": {"name": "llama-3.2-1b", "kv_transfer_config": BOTH},
    "multi-process": {"name": "llama-3.2-1b", "kv_transfer_config": MP},
    "none": {"name": "llama-3.2-1b"},
}


def ask(folder: Path, name: str, **arguments: Any) -> dict[str, Any]:
    """What the connector becomes on the CPU, and what the rules are told of the model."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(write(name, folder)), max_model_len=2048, skip_tokenizer_init=True, **arguments)
    try:
        config = args.create_engine_config()
    except SplintError as error:
        return {"refused": str(error)}
    told = vars(cache_of(config)) if config.model_config else {}
    transfer = config.kv_transfer_config
    manager = not config.scheduler_config.disable_hybrid_kv_cache_manager
    return {"connector": transfer and transfer.kv_connector, "hybrid manager": manager, "told": told}


def main() -> None:
    """Ask for every case, with each value of the setting."""
    CONFIGS["hybrid"] = HYBRID
    answers = {}
    for choice in ("refuse", "leave_out"):
        os.environ[SETTING] = choice
        answers[choice] = {case: ask(Path(sys.argv[1]), **given) for case, given in CASES.items()}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
