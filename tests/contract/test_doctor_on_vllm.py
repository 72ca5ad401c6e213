"""The doctor with vLLM's own parser: what the rules ask for exists, and what vLLM would refuse is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.servers import engine_environment

from entrypoint.doctor import parsing
from entrypoint.doctor.reading import Reading
from entrypoint.doctor.rules import RULES
from entrypoint.preflight.subject import Subject
from patches.framework.arguments import Arguments

GONE = {"calculate_kv_scales"}
"""Arguments of older releases only."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("doctor")
    (made / "config.json").write_text(
        json.dumps({"num_experts": 8, "num_attention_heads": 4, "torch_dtype": "bfloat16"})
    )
    (made / "serve.yaml").write_text(
        "data-parallel-size: 2\nenable_expert_parallel: true\ngrpc: true\nport: 7\n"
        "kv-transfer-config: {kv_connector: LMCacheMPConnector, kv_role: kv_both}\n"
    )
    return made


@pytest.fixture(scope="module")
def words(folder: Path) -> list[str]:
    return [str(folder), "--config", str(folder / "serve.yaml"), "-tp", "2", "--port=8"]


@pytest.fixture(scope="module")
def values(words: list[str]) -> dict[str, Any]:
    return parsing.vllms(words, engine_environment())


def test_config_file_and_aliases_are_read_as_vllm_reads_them(values: dict[str, Any]) -> None:
    names = ("data_parallel_size", "enable_expert_parallel", "tensor_parallel_size", "grpc", "port", "shutdown_timeout")
    assert [values[name] for name in names] == [2, True, 2, True, 8, 0]
    assert values["kv_transfer_config"]["kv_connector"] == "LMCacheMPConnector"


def test_our_own_reading_says_the_same(values: dict[str, Any], words: list[str]) -> None:
    """It stands in where vLLM's parser can't be run."""
    own = parsing.own(Arguments(words))
    compared = own.keys() & values.keys() - {"kv_transfer_config", "config"}
    assert len(compared) == 5
    assert {name: own[name] for name in compared} == {name: values[name] for name in compared}


def test_every_argument_that_a_rule_asks_for_exists(values: dict[str, Any], words: list[str]) -> None:
    asked: set[str] = set()

    class Recording(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            asked.add(name)
            return super().get(name, default)

    reading = Reading(Subject(Arguments(words), engine_environment()), Recording(values), "vLLM")
    for rule in RULES:
        rule.found(reading)
    assert len(asked) > 15
    assert asked - set(values) <= GONE


def doctor(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "entrypoint.cli", "doctor", *words],
        env=engine_environment(COLUMNS="150", **env), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_a_sound_server_gets_exit_code_0(folder: Path) -> None:
    ended = doctor(str(folder), "--json", "-dp", "2", "--enable-expert-parallel", "--port", "0", SPLINT_PREFLIGHT="on")
    found = json.loads(ended.stdout)
    assert (ended.returncode, found["healthy"]) == (0, True), ended.stdout
    assert found["read_by"].startswith("vLLM ")
    statuses = {result["id"]: result["status"] for result in found["preflight"]}
    assert statuses["allreduce"] == "passed"
    assert {finding["id"] for finding in found["findings"]} >= {"abrupt-end", "one-expert-rank", "cpu-experts"}
    assert "refuse" not in {finding["level"] for finding in found["findings"]}
    assert all(len(pairs) == 5 for pairs in found["checklists"].values())


def test_an_unsound_one_gets_78_and_a_table(folder: Path) -> None:
    """A flag in a file, one that does not exist, and patches that are off."""
    words = (str(folder), "--config", str(folder / "serve.yaml"), "--no-such-flag")
    ended = doctor(*words, SPLINT_PREFLIGHT="off", SPLINT_MODE="off")
    assert ended.returncode == 78
    complaint = "unrecognized arguments: --no-such-flag"
    for text in (complaint, "reach:grpc", "Change: ", "Checklist EP/DP", "refuse cpu-experts", "do not start this"):
        assert text in ended.stdout
    assert [line.partition(" ")[0] for line in ended.stderr.splitlines()] == ["splint"] * 3
    assert "vLLM's own parser" in ended.stderr
