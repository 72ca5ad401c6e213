from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from entrypoint import serve
from patches.framework.arguments import Arguments
from patches.framework.errors import EnvironmentRefusedError, SettingError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPLINT_MODE", "SPLINT_PATCHES", "SPLINT_SMOKE", "SPLINT_RUN_DIR", "SPLINT_KV_DTYPE", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPLINT_PREFLIGHT", "off")


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was executed in place of vLLM: command and environment."""
    calls: list[Any] = []
    monkeypatch.setattr("os.execve", lambda _, command, environ: calls.append((command, environ)))
    return calls


@pytest.mark.parametrize(
    ("words", "wanted"),
    [(["--port", "9"], "9"), (["--port=9"], "9"), (["--port", "1", "--port=9"], "9"), (["--port"], ""), ([], None)],
)
def test_the_last_value_of_an_option_counts(words: list[str], wanted: str | None) -> None:
    assert Arguments(words).value("--port") == wanted


def test_underscores_are_dashes() -> None:
    arguments = Arguments(["--kv_cache_dtype", "fp8_e5m2"])
    assert arguments.value("--kv-cache-dtype") == "fp8_e5m2"


@pytest.mark.parametrize("words", [["some/model", "--port", "1"], ["--port", "1", "--model", "some/model"]])
def test_the_model_is_the_first_word_or_an_option(words: list[str]) -> None:
    assert Arguments(words).model == "some/model"


def test_parallel_flags_are_shown_as_given() -> None:
    words = ["m", "-dp", "2", "--enable-expert-parallel", "--tensor-parallel-size=4", "--seed", "1"]
    assert Arguments(words).parallel() == ["-dp 2", "--enable-expert-parallel", "--tensor-parallel-size=4"]


@pytest.mark.parametrize("text", ["not json", "[1]", '{"kv_connector_extra_config": 3}'])
def test_a_strange_transfer_config_is_left_to_vllm(text: str) -> None:
    assert Arguments(["--kv-transfer-config", text]).extra_config == {}


def test_a_port_that_is_no_number_is_a_usage_error(capsys: pytest.CaptureFixture[str], became: list[Any]) -> None:
    assert serve.main(["m", "--port", "80a"]) == 2
    assert "wanted a number from 0 to 65535" in capsys.readouterr().err
    assert became == []


@pytest.mark.parametrize(
    ("words", "environ", "named"),
    [
        ([], {"VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND=1"),
        ([], {"LMCACHE_USE_UPSTREAM_MP": "true"}, "LMCACHE_USE_UPSTREAM_MP=true"),
        (["--grpc"], {}, "--grpc"),
        (["--kv-transfer-config", '{"kv_connector_extra_config": {"use_native": true}}'], {}, "use_native"),
    ],
)
def test_what_the_patches_can_not_reach_is_refused(words: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(EnvironmentRefusedError, match=named):
        serve.check(Arguments(["m", "--headless", *words]), environ)


def test_a_switch_that_is_off_is_not_refused() -> None:
    serve.check(Arguments(["m", "--headless"]), {"VLLM_USE_RUST_FRONTEND": "0", "LMCACHE_USE_UPSTREAM_MP": ""})


def test_report_mode_leaves_what_is_out_of_reach_to_the_new_process() -> None:
    serve.check(Arguments(["m", "--headless", "--grpc"]), {"SPLINT_MODE": "report"})


def test_an_unknown_setting_is_refused_with_the_nearest_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLINT_MOD", "enforce")
    with pytest.raises(SettingError, match="Did you mean SPLINT_MODE"):
        serve.check(Arguments(["m", "--headless"]), {})


@pytest.mark.parametrize(
    ("before", "after"),
    [("mine", "mine,vllm_splint"), ("", "vllm_splint"), ("vllm_splint,mine", "vllm_splint,mine"), (None, None)],
)
def test_the_plugin_list_names_us_where_there_is_one(before: str | None, after: str | None) -> None:
    environ = {} if before is None else {"VLLM_PLUGINS": before}
    serve.prepare(environ)
    assert environ.get("VLLM_PLUGINS") == after


def test_the_operators_hash_seed_is_kept() -> None:
    environ = {"PYTHONHASHSEED": "7"}
    serve.prepare(environ)
    assert environ == {"PYTHONHASHSEED": "7"}


def test_vllm_gets_every_word_untouched(became: list[Any]) -> None:
    words = ["m", "--headless", "-dp", "2", "--", "--weird=a b"]
    serve.main(words)
    [(command, environ)] = became
    assert command == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *words]
    assert environ["PYTHONHASHSEED"] == "0"


def test_the_banner_names_what_starts(became: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    extra = '{"kv_connector":"C","kv_connector_extra_config":{"lmcache.mp.host":"h","lmcache.mp.port":5}}'
    serve.main(["some/model", "--headless", "-dp", "2", "--kv-transfer-config", extra])
    banner = capsys.readouterr().err
    for text in ("vllm-splint ", "enforce", "some/model", "-dp 2", "C at h:5", "process_roster"):
        assert text in banner
    assert len(became) == 1


def test_a_pinned_kv_dtype_is_given_to_vllm_and_said(
    became: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLINT_KV_DTYPE", "fp8_e5m2")
    serve.main(["m", "--headless", "--", "x"])
    [(command, _)] = became
    assert command[3:] == ["serve", "m", "--headless", "--kv-cache-dtype", "fp8_e5m2", "--", "x"]
    assert "fp8_e5m2 (SPLINT_KV_DTYPE=fp8_e5m2)" in capsys.readouterr().err


def test_a_kv_dtype_beside_another_pinned_one_is_refused(became: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLINT_KV_DTYPE", "fp8_e5m2")
    assert serve.main(["m", "--headless", "--kv-cache-dtype", "auto"]) == 78
    assert became == []


def test_off_is_stock_with_one_line_and_no_checks(
    became: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLINT_MODE", "off")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    serve.main(["/absent", "--grpc"])
    [(command, environ)] = became
    assert command[3:] == ["serve", "/absent", "--grpc"]
    assert "PYTHONHASHSEED" not in environ
    assert capsys.readouterr().err.count("\n") == 1


def test_help_is_vllms_own(became: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    serve.main(["--help=all"])
    assert len(became) == 1
    assert capsys.readouterr().err == ""


def test_the_command_refuses_with_code_78_and_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPLINT_PREFLIGHT")
    ended = subprocess.run(
        [sys.executable, "-m", "entrypoint.cli", "serve", "/absent/model"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 78
    assert ended.stderr.startswith("splint serve: preflight: model: found no model at /absent/model; wanted")
    assert "Traceback" not in ended.stderr
