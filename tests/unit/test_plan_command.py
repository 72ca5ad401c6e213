"""``splint plan`` as it is called: what it prints, what it refuses, and with which code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.model_configs import CONFIGS, write

from entrypoint import cli
from entrypoint.planning import architectures
from entrypoint.planning.deployment import Deployment
from entrypoint.planning.plan import Plan
from entrypoint.planning.sizes import GIB

MEASURED = ("--activation-memory", "2GiB", "--graph-memory", "1GiB", "--other-memory", "2GiB")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write("qwen3-235b-a22b", tmp_path))


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["splint", "plan", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def planned(*words: str) -> dict[str, Any]:
        assert call(monkeypatch, *words, "--without-vllm", "--json") == 0
        made: dict[str, Any] = json.loads(capsys.readouterr().out)
        return made

    return planned


def test_what_a_start_would_measure_is_a_range_and_says_that_it_is_assumed(plan: Any, model: str) -> None:
    made = plan(model, "--device-memory", "141GB", "--dp", "8", "--ep")
    assert set(made["assumed"]) == {"activations", "CUDA graphs", "context, communication"}
    for found in made["assumed"].values():
        assert found["basis"] == "assumed"
        assert 0 <= found["low_bytes"] < found["high_bytes"]
        assert found["why"]
    assert made["low"]["blocks_per_dp_rank"] < made["high"]["blocks_per_dp_rank"]


def test_with_measured_amounts_there_is_one_number_and_the_memory_adds_up(plan: Any, model: str) -> None:
    made = plan(model, "--device-memory", "141GB", "--dp", "8", "--ep", "--kv-cache-dtype", "fp8", *MEASURED)
    assert made["low"] == made["high"]
    (stage,) = made["stages"]
    rest = sum(found["low_bytes"] for found in made["assumed"].values())
    assert rest == 5 * GIB
    assert stage["kv_bytes"] == [made["device"]["taken_bytes"] - rest - sum(stage["weights_bytes"].values())] * 2
    assert stage["kv_block_bytes"] == 16 * 94 * 2 * 4 * 128
    blocks = stage["kv_bytes"][0] // stage["kv_block_bytes"]
    assert made["high"] == {
        "fits": True,
        "blocks_per_dp_rank": blocks,
        "blocks_seen_by_an_ep_rank": blocks,
        "tokens_per_dp_rank": 16 * blocks,
        "blocks": 8 * blocks,
        "sequences_per_dp_rank": round(blocks / (40960 / 16), 4),
    }


def test_explicit_bytes_and_an_override_are_taken_as_they_are(plan: Any, model: str) -> None:
    words = (model, "--device-memory", "141GB", "--dp", "8", "--ep", "--max-model-len", "4096")
    made = plan(*words, "--kv-cache-memory-bytes", "10GiB")
    assert made["low"]["blocks_per_dp_rank"] == 10 * GIB // (16 * 94 * 2 * 4 * 128 * 2)
    assert made["low"] == made["high"]
    assert plan(*words, "--num-gpu-blocks-override", "300")["high"]["blocks_per_dp_rank"] == 300


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device-memory", "80GiB"), "weights"),
        (("--device-memory", "141GB", "--dp", "8", "--ep", "--kv-cache-memory-bytes", "100GiB"), "100.00 GiB"),
        (("--device-memory", "141GB", "--dp", "8", "--ep", "--num-gpu-blocks-override", "9999999"), "9999999"),
        (("--device-memory", "141GB", "--dp", "8", "--ep", "--max-model-len", "99000000"), "99000000 tokens"),
        (("--device-memory", "80"), "80GiB"),
        (("--device-memory", "9" * 400), "--device-memory of more than"),
        (("--device-memory", "9" * 400 + "GiB"), "--device-memory of more than"),
        (("--device-memory", "2000TiB"), "--device-memory of more than"),
        (("--device-memory", "141GB", "--num-gpu-blocks-override", "9" * 400), "blocks_override 999"),
        (("--device-memory", "141GB", "--max-num-seqs", "9" * 400), "sequences 999"),
        (("--device-memory", "141GB", "--gpu-memory-utilization", "90"), "gpu-memory-utilization"),
        (("--device-memory", "141GB", "--kv-cache-dtype", "nvfp4"), "nvfp4"),
        (("--device-memory", "141GB", "--quantization", "awq"), "awq"),
        (("--device-memory", "141GB", "--dtype", "float8_e4m3fn"), "float8_e4m3fn"),
        (("--device-memory", "141GB", "--tp", "5"), "does not divide by 5"),
        (("--device-memory", "141GB", "--block-size", "0"), "block_size"),
    ],
)
def test_what_does_not_fit_or_is_not_known_ends_with_code_78_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, words: tuple[str, ...], said: str
) -> None:
    assert call(monkeypatch, model, *words, "--without-vllm") == 78
    error = capsys.readouterr().err
    assert said in error
    assert "; wanted " in error


@pytest.mark.parametrize(
    "words", [(), ("--device-memory", "80GiB", "--enable-eplb"), ("--device-memory", "1", "--tp", "0")]
)
def test_a_flag_that_is_not_modelled_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, model: str, words: tuple[str, ...]
) -> None:
    assert call(monkeypatch, model, *words) == 2


def test_a_model_that_is_not_on_this_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert call(monkeypatch, "nobody/nothing", "--device-memory", "80GiB") == 78
    assert "config.json of nobody/nothing" in capsys.readouterr().err


def test_measured_weights_stand_in_for_a_quantisation_that_is_not_known(plan: Any, tmp_path: Path) -> None:
    config = {**CONFIGS["qwen3-32b"], "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = plan(str(tmp_path), "--device-memory", "48GiB", "--weights-memory", "18GiB", *MEASURED)
    assert made["stages"][0]["weights_bytes"] == {"as measured": 18 * GIB}


def test_a_kv_scheme_that_the_checkpoint_declares_must_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["qwen3-32b"], "quantization_config": scheme}))
    words = (str(tmp_path), "--device-memory", "141GB", "--weights-memory", "40GiB", "--without-vllm")
    assert call(monkeypatch, *words) == 78
    assert "8-bit float" in capsys.readouterr().err
    assert call(monkeypatch, *words, "--kv-cache-dtype", "fp8") == 0


def test_the_table_names_the_ranges_and_the_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert call(monkeypatch, model, "--device-memory", "141GB", "--dp", "4", "--pp", "2", "--ep", "--without-vllm") == 0
    shown = capsys.readouterr().out
    for text in ("layers 0 to 46", "layers 47 to 93", "activations (assumed)", "at worst", "EP 4", "pure model alone"):
        assert text in shown


def made(gibibytes: int, dp: int, expert_parallel: bool, kv_dtype: str) -> Plan:
    shape = architectures.shape(CONFIGS["mixtral-8x7b"])
    wanted = Deployment(
        gibibytes * GIB, dp=dp, expert_parallel=expert_parallel, kv_dtype=kv_dtype, weights=20 * GIB,
        batched_tokens=2048, sequences=256,  # by default they grow with the device
    )  # fmt: skip
    return Plan(shape, wanted, with_vllm=False)


@settings(deadline=None)
@given(memory=st.integers(60, 200), more=st.integers(0, 100), dp=st.integers(1, 64))
def test_more_memory_never_means_fewer_blocks(memory: int, more: int, dp: int) -> None:
    for less, greater in zip(
        (made(memory, dp, True, "auto").low, made(memory, dp, True, "auto").high),
        (made(memory + more, dp, True, "auto").low, made(memory + more, dp, True, "auto").high),
        strict=True,
    ):
        if less.budget is not None:
            assert greater.budget is not None
            assert greater.budget.per_dp_blocks >= less.budget.per_dp_blocks


@settings(deadline=None)
@given(blocks=st.integers(3000, 10**6), dp=st.integers(1, 1024), expert_parallel=st.booleans())
def test_blocks_are_split_by_dp_once_and_by_ep_never(blocks: int, dp: int, expert_parallel: bool) -> None:
    plan = made(100, dp, expert_parallel, "fp8")
    bytes_a_block = plan.stages[0].token_bytes * plan.block_size
    assert plan.blocks([blocks * bytes_a_block + bytes_a_block - 1]) == blocks
    plan = Plan(plan.shape, Deployment(
        100 * GIB, dp=dp, expert_parallel=expert_parallel, kv_dtype="fp8", kv_memory=blocks * bytes_a_block,
        weights=20 * GIB), with_vllm=False)  # fmt: skip
    budget = plan.high.budget
    assert budget is not None
    assert (budget.per_dp_blocks, budget.per_ep_view_blocks) == (blocks, blocks)
    assert budget.num_blocks_global == blocks * dp
