"""Weights, caches and stages of ``splint plan``, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model_configs import CONFIGS

from entrypoint.planning import architectures, sizes
from entrypoint.planning.cache import layer_caches
from entrypoint.planning.split import Split
from entrypoint.planning.weights import stage_weights
from patches.framework.errors import PlanError


def token_bytes(model: str, kv_dtype: str, tp: int = 1) -> int:
    shape = architectures.shape(CONFIGS[model])
    return sum(cache.token_bytes for cache in layer_caches(shape, Split(tp), range(shape.layers), "bfloat16", kv_dtype))


@pytest.mark.parametrize(
    ("model", "kv_dtype", "tp", "expected"),
    [
        ("llama-3.1-70b", "auto", 1, 80 * 8 * 128 * 2 * 2),
        ("llama-3.1-70b", "fp8", 8, 80 * 1 * 128 * 2),
        ("qwen3-235b-a22b", "fp8_e5m2", 8, 94 * 1 * 128 * 2),
        ("deepseek-v3", "auto", 1, 61 * 576 * 2),
        ("deepseek-v3", "fp8", 8, 61 * 576),
        ("deepseek-v3.2", "fp8_ds_mla", 8, 61 * (656 + 132)),
    ],
)
def test_kv_bytes_a_token_on_one_device(model: str, kv_dtype: str, tp: int, expected: int) -> None:
    assert token_bytes(model, kv_dtype, tp) == expected


@pytest.mark.parametrize(
    ("model", "kv_dtype"),
    [
        ("llama-3.1-70b", "fp8_ds_mla"),
        ("deepseek-v3", "fp8_ds_mla"),
        ("deepseek-v3", "fp8_e5m2"),
        ("deepseek-v3.2", "fp8"),
        ("llama-3.1-70b", "turboquant_3bit_nc"),
        ("llama-3.1-70b", "nvfp4"),
        ("llama-3.1-70b", "float16"),
    ],
)
def test_a_kv_dtype_whose_bytes_are_not_known_for_this_attention_is_refused(model: str, kv_dtype: str) -> None:
    with pytest.raises(PlanError, match="kv-cache-dtype"):
        token_bytes(model, kv_dtype)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM"),
        ({"architectures": ["NemotronHForCausalLM"]}, "NemotronHForCausalLM"),
        ({"architectures": []}, "unnamed"),
        ({"architectures": ["Qwen3NextForCausalLM", "Other"]}, "Qwen3NextForCausalLM, Other"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window 4096"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 94}, "sliding_attention"),
        ({"vision_config": {"depth": 1}}, "vision_config"),
        ({"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk_attention_config"),
        ({"num_experts": None}, "num_experts"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, "weight_block_size"),
        (
            {
                "quantization_config": {
                    "quant_method": "fp8",
                    "weight_block_size": [128, 128],
                    "modules_to_not_convert": ["model.layers.0.self_attn"],
                }
            },
            "self_attn",
        ),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        architectures.shape({**CONFIGS["qwen3-235b-a22b"], **change})


@pytest.mark.parametrize("named", ["float32", "torch.float32", "float"])
def test_auto_serves_a_float32_checkpoint_in_16_bits_as_vllm_does(named: str) -> None:
    config = {**CONFIGS["llama-3.2-1b"], "torch_dtype": named}
    assert architectures.shape(config).dtype == "bfloat16"
    assert architectures.shape({**config, "torch_dtype": "float16"}).dtype == "float16"


def test_a_harmless_sliding_window_of_a_model_that_does_not_use_it_is_no_reason_to_refuse() -> None:
    config = {**CONFIGS["qwen3-32b"], "sliding_window": 4096, "use_sliding_window": False}
    assert architectures.shape(config).layers == 64


@pytest.mark.parametrize(
    ("model", "split", "named"),
    [
        ("llama-3.1-70b", Split(tp=3), "vocabulary|heads"),
        ("qwen2.5-7b", Split(tp=8), "heads"),
        ("qwen3-235b-a22b-fp8", Split(tp=8, moe=True), "block of 128"),
        ("mixtral-8x7b", Split(tp=2, dp=3, moe=True), "expert's width"),
    ],
)
def test_what_does_not_divide_is_refused_as_vllm_does(model: str, split: Split, named: str) -> None:
    shape = architectures.shape(CONFIGS[model])
    with pytest.raises(PlanError, match=named):
        stage_weights(shape, split, range(shape.layers), 2)


def test_expert_parallelism_takes_the_block_of_fp8_experts_whole() -> None:
    shape = architectures.shape(CONFIGS["qwen3-235b-a22b-fp8"])
    parts = stage_weights(shape, Split(tp=8, expert_parallel=True, moe=True), range(shape.layers), 2)
    assert parts["experts"] == 94 * 16 * (3 * 4096 * 1536 + 3 * 32 * 12 * 4)


def test_ranks_of_a_dense_model_hold_it_whole_however_many_there_are() -> None:
    shape = architectures.shape(CONFIGS["qwen3-32b"])
    one, many = (stage_weights(shape, Split(dp=dp), range(shape.layers), 2) for dp in (1, 8))
    assert one == many


@given(layers=st.integers(1, 200), pp=st.integers(1, 64))
def test_stages_cover_every_layer_once(layers: int, pp: int) -> None:
    if pp > layers:
        with pytest.raises(PlanError, match="pipeline stages"):
            Split(pp=pp).stages(layers)
        return
    stages = Split(pp=pp).stages(layers)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


@given(experts=st.integers(1, 512), tp=st.sampled_from([1, 2, 4, 8]), dp=st.integers(1, 64))
def test_the_fullest_rank_holds_at_most_one_expert_more_than_its_share(experts: int, tp: int, dp: int) -> None:
    split = Split(tp=tp, dp=dp, expert_parallel=True, moe=True)
    assert split.ep == tp * dp
    assert 0 <= split.local_experts(experts) * split.ep - experts < split.ep


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 << 30), ("141GB", 141 * 10**9), ("1.5 gib", 3 << 29), ("68719476736", 64 << 30)]
)
def test_amounts_with_and_without_units(text: str, size: int) -> None:
    assert sizes.parse(text, "memory") == size


@pytest.mark.parametrize("text", ["80", "80GiBB", "-1GiB", "", "lots"])
def test_an_amount_without_its_unit_is_not_guessed_at(text: str) -> None:
    with pytest.raises(PlanError, match="memory"):
        sizes.parse(text, "memory")
