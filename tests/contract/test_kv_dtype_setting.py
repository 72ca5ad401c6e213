"""``SPLINT_KV_DTYPE`` against vLLM's own reading of checkpoints and flags."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.servers import engine_environment

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "hidden_size": 128,
    "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512,
}  # fmt: skip
DECLARED = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "quantization": {}}

# One import of vLLM for all cases: each is (pinned, flag, whether the checkpoint declares an fp8 KV cache).
CODE = """
    import json, os, sys
    from vllm.engine.arg_utils import EngineArgs
    from vllm.config import VllmConfig
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string
    from patches.framework import kv_dtype, process
    from patches.framework.errors import SettingError

    answers = []
    for pinned, flag, declared in json.loads(sys.argv[1]):
        os.environ["SPLINT_KV_DTYPE"] = pinned
        engine = EngineArgs(model=sys.argv[2], skip_tokenizer_init=True, kv_cache_dtype=flag, max_model_len=64)
        config = engine.create_engine_config()
        if declared:
            config.model_config.hf_config.quantization_config = json.loads(sys.argv[3])
            resolved = resolve_kv_cache_dtype_string(flag, config.model_config)
            config.cache_config.cache_dtype = resolved
        try:
            process.start().take_config(config)
            answers.append([config.cache_config.cache_dtype, ""])
        except SettingError as error:
            answers.append([config.cache_config.cache_dtype, error.found])
    print(json.dumps([answers, process.current().facts]))
"""
CASES = [
    ("", "auto", False),
    ("fp8_e5m2", "fp8_e5m2", False),
    ("model", "auto", False),
    ("fp8_e5m2", "auto", False),
    ("model", "auto", True),
    ("auto", "auto", True),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE), json.dumps(CASES), str(folder), json.dumps(DECLARED)],
        env=engine_environment(), capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_an_engine_that_obeys_is_let_start(answers: Any) -> None:
    assert answers[0][:3] == [["auto", ""], ["fp8_e5m2", ""], ["auto", ""]]


def test_an_engine_with_another_dtype_is_refused(answers: Any) -> None:
    assert answers[0][3] == ["auto", "SPLINT_KV_DTYPE=fp8_e5m2, but the engine's KV cache is auto"]


def test_a_declared_fp8_cache_is_not_the_models_own_dtype(answers: Any) -> None:
    """vLLM turns ``auto`` into what the checkpoint declares."""
    [dtype, found] = answers[0][4]
    assert dtype == "fp8_e4m3"
    assert found.startswith("SPLINT_KV_DTYPE=model, but the engine's KV cache is fp8_e4m3")
    assert answers[0][5] == ["fp8_e4m3", ""]


def test_the_process_notes_dtype_and_setting_for_the_report(answers: Any) -> None:
    assert answers[1] == {"kv_cache_dtype": "fp8_e4m3", "kv_cache_dtype_pinned": "auto"}
