from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patches import bootstrap
from patches.framework import reach
from patches.framework.arguments import Arguments
from patches.framework.errors import EnvironmentRefusedError

NATIVE = '{"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": {"use_native": true}}'
CLI = ("-m", "vllm.entrypoints.cli.main")
EVERY_FORM = pytest.mark.parametrize(
    "form",
    [(*CLI, "serve", "m"), ("-m", "vllm.entrypoints.openai.api_server", "--model", "m")],
    ids=["serve", "module"],
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "serve.yaml"


@pytest.mark.parametrize(
    "words",
    [
        ["--grpc"],
        ["--grp"],
        ["--kv-transfer-config", NATIVE],
        [f"--kv_transfer_config={NATIVE}"],
        ["--kv-transfer-config.kv_connector_extra_config.use_native", "true"],
        ["--kv-transfer-config.kv_connector_extra_config.use_native=1", "--kv-transfer-config", "{}"],
    ],
)
def test_what_the_command_line_takes_out_of_reach_is_found(words: list[str]) -> None:
    assert len(reach.found(Arguments(["m", *words]), {})) == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--grpc-port", "5"],
        ["--kv-transfer-config", '{"kv_connector_extra_config": {"use_native": false}}'],
        ["--kv-transfer-config.kv_connector_extra_config.use_native=false"],
    ],
)
def test_what_stays_in_reach_is_not_found(words: list[str]) -> None:
    assert reach.found(Arguments(["m", *words]), {}) == []


@pytest.mark.parametrize(
    "content",
    [
        "grpc: true",
        "kv-transfer-config:\n  kv_connector_extra_config:\n    use_native: true",
        f"kv_transfer_config: '{NATIVE}'",
    ],
)
def test_a_config_file_is_looked_into(config: Path, content: str) -> None:
    config.write_text(content)
    assert len(reach.found(Arguments(["m", "--config", str(config)]), {})) == 1


@pytest.mark.parametrize("content", ["grpc: false", "[1]", "{", "", "port: 1"])
def test_a_config_file_without_it_takes_nothing_out_of_reach(config: Path, content: str) -> None:
    config.write_text(content)
    assert reach.found(Arguments(["m", "--config", str(config)]), {}) == []


def test_the_command_line_overrides_the_config_file(config: Path) -> None:
    config.write_text("port: 1\nhost: h\n")
    arguments = Arguments(["--config", str(config), "--port", "2"])
    assert (arguments.value("--port"), arguments.value("--host")) == ("2", "h")


@pytest.mark.parametrize(
    ("name", "text", "on"),
    [
        ("VLLM_USE_RUST_FRONTEND", "1", True),
        ("VLLM_USE_RUST_FRONTEND", "0", False),
        ("LMCACHE_USE_UPSTREAM_MP", "1", True),
        # vLLM asks only whether it is set.
        ("LMCACHE_USE_UPSTREAM_MP", "0", True),
        ("LMCACHE_USE_UPSTREAM_MP", "", False),
    ],
)
def test_a_variable_is_read_as_its_library_reads_it(name: str, text: str, on: bool) -> None:
    assert bool(reach.found(None, {name: text})) is on


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("vllm", ["snapshot", "restore", "x"]),
        ("vllm.entrypoints.cli.main", ["snapshot", "create"]),
        ("vllm.entrypoints.launchers.grpc_server", ["--model", "m"]),
        ("lmcache.v1.multiprocess.server", []),
    ],
)
def test_a_command_that_no_patch_reaches_is_refused(program: str, words: list[str]) -> None:
    with pytest.raises(EnvironmentRefusedError, match=r"grpc_server|snapshot|multiprocess\.server"):
        reach.check_command(program, words)


@pytest.mark.parametrize("words", [["snapshot", "inspect"], ["serve", "snapshot"], []])
def test_other_commands_are_not_refused(words: list[str]) -> None:
    reach.check_command("vllm", words)


def test_the_readme_names_all_of_it() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for switch in (*reach.VARIABLES, *reach.FLAGS, *reach.CONNECTOR_SETTINGS, *reach.COMMANDS):
        assert switch.name in readme


def start(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Start a command of vLLM; it must end before vLLM is imported."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("SPLINT_", "VLLM_", "LMCACHE_"))}
    return subprocess.run(
        [sys.executable, *words], env={**kept, **env}, capture_output=True, text=True, timeout=120, check=False
    )


def refused(ended: subprocess.CompletedProcess[str]) -> bool:
    return ended.returncode == 78 and ended.stderr.startswith("splint: ") and ended.stderr.count("\n") == 1


@EVERY_FORM
def test_every_form_of_start_refuses_a_flag_in_a_config_file(config: Path, form: tuple[str, ...]) -> None:
    config.write_text("grpc: true")
    ended = start(*form, "--config", str(config))
    assert refused(ended), ended.stderr
    assert "--grpc answers requests on a port that the gate does not guard" in ended.stderr


@EVERY_FORM
def test_every_form_of_start_refuses_vllms_copy_of_the_connector(form: tuple[str, ...]) -> None:
    ended = start(*form, "--kv-transfer-config", NATIVE)
    assert refused(ended), ended.stderr
    assert "use_native in --kv-transfer-config" in ended.stderr


def test_the_rust_front_end_is_refused_before_vllm_is_imported() -> None:
    ended = start(*CLI, "serve", "m", VLLM_USE_RUST_FRONTEND="1")
    assert refused(ended), ended.stderr
    assert "VLLM_USE_RUST_FRONTEND=1 answers" in ended.stderr


def test_report_mode_says_it_and_goes_on(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SPLINT_MODE", "report")
    bootstrap._check_reach("vllm", ["serve", "m", "--grpc"], serving=True)
    assert "--grpc answers" in capfd.readouterr().err


def test_a_snapshot_is_not_restored() -> None:
    ended = start(*CLI, "snapshot", "restore", "x")
    assert refused(ended), ended.stderr
    assert "vllm snapshot restore takes up captured processes" in ended.stderr
