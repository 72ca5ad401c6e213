"""Configurations and flags that vLLM would not start with: ``splint plan`` says so, and never answers or breaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.model_configs import CONFIGS, write

from entrypoint import cli
from entrypoint.planning import architectures, configuration
from entrypoint.planning.deployment import Deployment
from entrypoint.planning.plan import make
from entrypoint.planning.sizes import GIB
from entrypoint.planning.split import MOST_DP, Split
from patches.framework.errors import PlanError

FP8 = CONFIGS["deepseek-v3"]["quantization_config"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", [5]),
        ("architectures", "LlamaForCausalLM"),
        ("layer_types", 5),
        ("layer_types", [[]]),
        ("rope_scaling", "dynamic"),
        ("rope_parameters", ["yarn"]),
        ("hidden_size", "4096"),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("hidden_size", -4096),
        ("hidden_size", 10**400),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", 7),
        ("head_dim", 128.0),
        ("vocab_size", [1]),
        ("intermediate_size", -1),
        ("intermediate_size", "12288"),
        ("max_position_embeddings", "40960"),
        ("max_position_embeddings", 0),
        ("mlp_only_layers", 3),
        ("mlp_only_layers", ["3"]),
        ("mlp_layer_types", "sparse"),
        ("num_hidden_layers", 32.5),
        ("num_hidden_layers", -3),
        ("num_hidden_layers", 10**7),
        ("num_experts", 0),
        ("num_experts_per_tok", 0),
        ("moe_intermediate_size", None),
        ("decoder_sparse_step", 0),
        ("decoder_sparse_step", -1),
        ("tie_word_embeddings", "false"),
        ("torch_dtype", "bfloat17"),
        ("torch_dtype", 16),
        ("dtype", ["bfloat16"]),
        ("quantization_config", "fp8"),
    ],
)
def test_a_field_that_is_not_what_it_must_be_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=field) as refused:
        architectures.shape({**CONFIGS["qwen3-235b-a22b"], field: value})
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("deepseek-v3", {"moe_layer_freq": 0}),
        ("deepseek-v3", {"first_k_dense_replace": -1}),
        ("deepseek-v3", {"kv_lora_rank": 0}),
        ("deepseek-v3", {"n_routed_experts": 0}),
        ("deepseek-v3.2", {"index_head_dim": 0}),
        ("mixtral-8x7b", {"num_local_experts": 0}),
        ("qwen3-32b", {"intermediate_size": None}),
    ],
)
def test_so_is_one_of_another_architecture(model: str, change: dict[str, Any]) -> None:
    (field,) = change
    with pytest.raises(PlanError, match=field):
        architectures.shape({**CONFIGS[model], **change})


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ("qwen2.5-7b", "num_key_value_heads"),
        ("qwen3-32b", "head_dim"),
        ("mixtral-8x7b", "num_key_value_heads"),
        ("qwen2-57b-a14b", "shared_expert_intermediate_size"),
        ("qwen3-235b-a22b", "num_key_value_heads"),
        ("deepseek-v3", "q_lora_rank"),
        ("deepseek-v3", "n_shared_experts"),
        ("deepseek-v3", "first_k_dense_replace"),
        ("deepseek-v3.2", "index_topk"),
    ],
)
def test_a_field_for_which_transformers_has_a_number_of_its_own_must_be_there(model: str, field: str) -> None:
    config = dict(CONFIGS[model])
    del config[field]
    with pytest.raises(PlanError, match=f"without '{field}'"):
        architectures.shape(config)


def test_so_must_a_sliding_window_that_transformers_would_fill_in() -> None:
    mistral = {**CONFIGS["llama-3.1-70b"], "architectures": ["MistralForCausalLM"]}
    assert architectures.shape({**mistral, "sliding_window": None}).layers == 80
    qwen = {name: value for name, value in CONFIGS["qwen3-32b"].items() if name != "sliding_window"}
    for config in (mistral, {**qwen, "use_sliding_window": True}):
        with pytest.raises(PlanError, match="without 'sliding_window'"):
            architectures.shape(config)


def test_more_experts_a_token_than_there_are_are_refused() -> None:
    with pytest.raises(PlanError, match="9 experts a token of 8"):
        architectures.shape({**CONFIGS["mixtral-8x7b"], "num_experts_per_tok": 9})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight_block_size", [128]),
        ("weight_block_size", [0, 128]),
        ("weight_block_size", 128),
        ("weight_block_size", ["128", 128]),
        ("quant_method", 8),
        ("modules_to_not_convert", "lm_head"),
        ("ignored_layers", [1]),
    ],
)
@pytest.mark.parametrize("weigh", [True, False])
def test_a_broken_quantisation_is_refused_even_where_weights_are_measured(field: str, value: Any, weigh: bool) -> None:
    config = {**CONFIGS["deepseek-v3"], "quantization_config": {**FP8, field: value}}
    with pytest.raises(PlanError, match=f"quantization_config.{field}"):
        architectures.shape(config, weigh=weigh)


@pytest.mark.parametrize(
    "change",
    [{"factor": "4"}, {"factor": float("nan")}, {"factor": 10**400}, {"factor": None}, {"rope_type": []}, {"type": 1}],
)
def test_a_broken_scaling_of_positions_is_refused(change: dict[str, Any]) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, **change}
    with pytest.raises(PlanError, match=r"rope_scaling|factor"):
        architectures.shape({**CONFIGS["qwen3-32b"], "rope_scaling": scaling})


def plan(folder: Path, change: dict[str, Any], **flags: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIGS["qwen3-32b"], **change}))
    make(str(folder), Deployment(800 * GIB, **flags), with_vllm=False)


def test_a_sequence_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    plan(tmp_path, {}, max_model_len=40960)
    with pytest.raises(PlanError, match="--max-model-len of 40961 tokens for a model of 40960"):
        plan(tmp_path, {}, max_model_len=40961)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "factor": 4.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
        {"model_max_length": 131072},
        {"max_position_embeddings": None},
    ],
)
def test_but_not_where_positions_are_scaled_or_the_model_names_another_length(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    plan(tmp_path, change, max_model_len=65536)


def test_nor_where_vllm_is_told_to_allow_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    plan(tmp_path, {}, max_model_len=65536)


@pytest.mark.parametrize("measured", [None, 40 * GIB])
def test_e5m2_keys_of_an_fp8_checkpoint_are_refused_even_where_weights_are_measured(
    tmp_path: Path, measured: int | None
) -> None:
    plan(tmp_path, {}, kv_dtype="fp8_e5m2", weights=measured)
    plan(tmp_path, {"quantization_config": FP8}, kv_dtype="fp8", weights=measured)
    with pytest.raises(PlanError, match="fp8_e5m2"):
        plan(tmp_path, {"quantization_config": FP8}, kv_dtype="fp8_e5m2", weights=measured)


@pytest.mark.parametrize("size", [1, 7, 24])
def test_a_block_size_that_no_backend_takes_is_refused(size: int) -> None:
    with pytest.raises(PlanError, match=f"--block-size {size}"):
        Deployment(80 * GIB, block_size=size)


def test_fewer_tokens_a_step_than_sequences_are_refused() -> None:
    Deployment(80 * GIB, sequences=256, batched_tokens=256)
    with pytest.raises(PlanError, match="--max-num-batched-tokens 255 with --max-num-seqs 256"):
        Deployment(80 * GIB, sequences=256, batched_tokens=255)


def test_more_data_parallel_ranks_than_vllm_can_number_are_refused() -> None:
    assert Split(dp=MOST_DP).devices == MOST_DP
    with pytest.raises(PlanError, match="--data-parallel-size 65537"):
        Split(dp=MOST_DP + 1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is no JSON"),
        (b"[1]", "holds a list"),
        (b"null", "holds null"),
        (b"\x80\x02\xff", "is no text"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_a_file_that_is_no_configuration_is_called_what_it_is(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    folder = write("qwen3-32b", tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(PlanError, match=f"{name} {said}"):
        configuration.read(str(folder))


def test_a_folder_in_the_configurations_place_is_called_unreadable(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(PlanError, match=r"config\.json can't be read"):
        configuration.read(str(tmp_path))


def test_the_configuration_itself_stands_for_its_folder(tmp_path: Path) -> None:
    folder = write("qwen3-32b", tmp_path)
    assert configuration.read(str(folder / "config.json")) == configuration.read(str(folder))


def test_another_file_or_an_empty_folder_is_not_taken_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(PlanError, match=r"model\.gguf, a file"):
        configuration.read(str(tmp_path / "model.gguf"))
    with pytest.raises(PlanError, match=r"no config\.json"):
        configuration.read(str(tmp_path))


def test_what_is_broken_ends_the_command_with_code_78_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["qwen3-32b"], "rope_scaling": "dynamic"}))
    monkeypatch.setattr("sys.argv", ["splint", "plan", str(tmp_path), "--device-memory", "80GiB"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 78
    assert "rope_scaling 'dynamic' in the configuration; wanted an object" in capsys.readouterr().err
