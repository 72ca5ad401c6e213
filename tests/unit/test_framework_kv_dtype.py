"""``SPLINT_KV_DTYPE`` on the command line, and what a model's files say about its KV cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework import checkpoint, kv_dtype
from patches.framework.arguments import Arguments
from patches.framework.errors import RefusedError, SettingError

FP8_SCHEME = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "torch_dtype": "bfloat16"}


def model(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def words(pinned: str, *given: str) -> list[str]:
    return kv_dtype.words(Arguments(["m", *given]), {"SPLINT_KV_DTYPE": pinned})


@pytest.mark.parametrize("pinned", ["fp8_e5m2", "bfloat16", "auto", "turboquant_4bit_nc"])
def test_a_pinned_dtype_becomes_the_flag(pinned: str) -> None:
    assert words(pinned) == ["--kv-cache-dtype", pinned]


def test_without_the_setting_nothing_is_added() -> None:
    assert kv_dtype.words(Arguments(["m"]), {}) == []


@pytest.mark.parametrize(
    ("pinned", "given"),
    [("fp8_e5m2", "fp8_e5m2"), ("fp8", "fp8_e4m3"), ("auto", "auto"), ("model", "auto"), ("model", "bfloat16")],
)
def test_a_flag_that_says_the_same_is_left_alone(pinned: str, given: str) -> None:
    assert words(pinned, "--kv-cache-dtype", given) == []


@pytest.mark.parametrize(
    ("pinned", "given"),
    [("fp8_e5m2", "fp8_e4m3"), ("fp8_e5m2", "auto"), ("auto", "fp8"), ("model", "fp8"), ("bfloat16", "float16")],
)
def test_another_flag_is_refused(pinned: str, given: str) -> None:
    with pytest.raises(SettingError, match=f"SPLINT_KV_DTYPE={pinned} and --kv-cache-dtype {given}"):
        words(pinned, f"--kv_cache_dtype={given}")


def test_another_dtype_in_a_config_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("kv-cache-dtype: fp8\n")
    with pytest.raises(SettingError, match="SPLINT_KV_DTYPE=fp8_e5m2 and --kv-cache-dtype fp8"):
        words("fp8_e5m2", "--config", str(tmp_path / "serve.yaml"))


def test_model_is_auto_where_the_checkpoint_declares_nothing(tmp_path: Path) -> None:
    arguments = Arguments([model(tmp_path, torch_dtype="bfloat16")])
    assert kv_dtype.words(arguments, {"SPLINT_KV_DTYPE": "model"}) == ["--kv-cache-dtype", "auto"]


@pytest.mark.parametrize(("given", "dtype"), [((), "bfloat16"), (("--dtype", "half"), "float16")])
def test_model_is_a_name_where_auto_would_follow_a_declared_quantisation(
    tmp_path: Path, given: tuple[str, ...], dtype: str
) -> None:
    arguments = Arguments([model(tmp_path, **FP8_SCHEME), *given])
    assert kv_dtype.words(arguments, {"SPLINT_KV_DTYPE": "model"}) == ["--kv-cache-dtype", dtype]


def test_auto_is_no_way_to_ask_for_the_models_dtype_where_it_means_fp8(tmp_path: Path) -> None:
    arguments = Arguments([model(tmp_path, **FP8_SCHEME), "--kv-cache-dtype", "auto"])
    with pytest.raises(SettingError):
        kv_dtype.words(arguments, {"SPLINT_KV_DTYPE": "model"})


def test_model_needs_to_know_the_models_dtype(tmp_path: Path) -> None:
    arguments = Arguments([model(tmp_path, **{**FP8_SCHEME, "torch_dtype": "float32"})])
    with pytest.raises(RefusedError, match="declares kv_cache_scheme 8-bit float"):
        kv_dtype.words(arguments, {"SPLINT_KV_DTYPE": "model"})


@pytest.mark.parametrize("text", ["FP8", "fp8 e5m2", "fp8-e5m2"])
def test_a_value_that_can_be_no_dtype_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="a name that --kv-cache-dtype takes"):
        words(text)


def engine(cache_dtype: str, **hf_config: Any) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(dtype="torch.bfloat16", hf_config=SimpleNamespace(**hf_config)),
    )


@pytest.mark.parametrize(
    ("pinned", "found"),
    [
        ("fp8", "fp8_ds_mla"),
        ("bfloat16", "auto"),
        ("auto", "fp8"),
        ("model", "auto"),
        ("model", "bfloat16"),
        ("", "fp8"),
    ],
)
def test_an_engine_with_the_pinned_dtype_starts(pinned: str, found: str) -> None:
    kv_dtype.check_engine(engine(found), {"SPLINT_KV_DTYPE": pinned})


@pytest.mark.parametrize(("pinned", "found"), [("fp8_e5m2", "auto"), ("model", "fp8_ds_mla"), ("bfloat16", "fp8")])
def test_an_engine_with_another_dtype_is_refused(pinned: str, found: str) -> None:
    with pytest.raises(SettingError, match=f"SPLINT_KV_DTYPE={pinned}, but the engine's KV cache is {found}"):
        kv_dtype.check_engine(engine(found), {"SPLINT_KV_DTYPE": pinned})


def test_an_engine_that_would_follow_the_checkpoints_quantisation_is_refused() -> None:
    declared = engine("auto", quantization_config=FP8_SCHEME["quantization_config"])
    with pytest.raises(SettingError, match="as the checkpoint declares"):
        kv_dtype.check_engine(declared, {"SPLINT_KV_DTYPE": "model"})


def test_the_dtype_is_said_for_people() -> None:
    assert [kv_dtype.said(engine(name)) for name in ("fp8_e5m2", "auto")] == ["fp8_e5m2", "auto (bfloat16)"]


def test_a_model_is_found_in_the_hubs_cache(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--org--name"
    (cached / "snapshots" / "c0ffee").mkdir(parents=True)
    (cached / "snapshots" / "c0ffee" / "config.json").write_text('{"torch_dtype": "float16"}')
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("c0ffee")
    environ = {"HF_HOME": str(tmp_path)}
    assert checkpoint.dtype(checkpoint.read("org/name", None, environ)) == "float16"
    assert checkpoint.dtype(checkpoint.read("org/name", "c0ffee", environ)) == "float16"
    assert checkpoint.read("org/other", None, environ) == {}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": FP8_SCHEME}, "kv_cache_scheme 8-bit float"),
        ({"config.json": {"text_config": FP8_SCHEME}}, "kv_cache_scheme 8-bit float"),
        (
            {"config.json": {}, "hf_quant_config.json": {"quantization": {"kv_cache_quant_algo": "FP8"}}},
            "kv_cache_quant_algo FP8",
        ),
        ({"config.json": {"quantization_config": {"quant_method": "fp8"}}}, None),
        ({"config.json": []}, None),
        ({}, None),
    ],
)
def test_a_declared_kv_quantisation_is_read(tmp_path: Path, files: dict[str, Any], said: str | None) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert checkpoint.declared_kv_quantisation(checkpoint.read(str(tmp_path), None, {})) == said


PINNED = ["--kv-cache-dtype", "fp8_e5m2"]
STAND_IN = "import json, sys; print(json.dumps(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("command", "seen"),
    [
        (["-m", "vllm.entrypoints.cli.main", "serve", "m"], ["serve", "m", *PINNED]),
        (["-m", "vllm.entrypoints.cli.main", "serve", "m", "--", "x"], ["serve", "m", *PINNED, "--", "x"]),
        (["bin/vllm", "serve", "m"], ["serve", "m", *PINNED]),
        (["-m", "vllm.entrypoints.openai.api_server"], PINNED),
    ],
)
def test_plain_vllm_serve_obeys(tmp_path: Path, command: list[str], seen: list[str]) -> None:
    """What vLLM would read from its command line, printed by a module that stands in its place."""
    for name in ("vllm/entrypoints/cli/main.py", "vllm/entrypoints/openai/api_server.py", "bin/vllm"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(STAND_IN)
        for folder in list(file.parents)[: name.count("/")]:
            (folder / "__init__.py").touch()
    kept = {name: text for name, text in os.environ.items() if not name.startswith("SPLINT_")}
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        [sys.executable, *command], env={**kept, "PYTHONPATH": path, "SPLINT_KV_DTYPE": "fp8_e5m2"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert json.loads(ended.stdout) == seen, ended.stderr


def test_plain_vllm_serve_refuses_another_dtype() -> None:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("SPLINT_")}
    ended = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "m", "--kv-cache-dtype", "fp8"],
        env={**kept, "SPLINT_KV_DTYPE": "bfloat16"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 78
    assert ended.stderr.startswith("splint: SPLINT_KV_DTYPE=bfloat16 and --kv-cache-dtype fp8; wanted")
