"""The KV round trip and the attention check on one real engine with LMCache: sound they pass, each sabotage shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.kv_probe_engine import SABOTAGES
from support.servers import connector_config, engine_environment, lmcache_server

from entrypoint.smoke.check import CheckFailedError
from entrypoint.smoke.checks import attention, kv_round_trip

pytestmark = pytest.mark.full

JUDGES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "kv_round_trip": kv_round_trip.judge,
    "attention": attention.judge,
}
VERDICTS = {
    "two_layers_share_memory": r"\d+ differing bytes in 1 layers of DP0 rank 0, first in model.layers.0\S+, written",
    "one_bit_flips_on_the_way_back": r"1 differing bytes in 1 layers of DP0 rank 0, first in model.layers.1\S+, stored",
    "nothing_comes_back": r"\d+ differing bytes in 2 layers of DP0 rank 0, first in model.layers.0\S+, stored",
    "another_format_is_read": r"model.layers.0\S+ of DP0 rank 0 \S+ away from the float32 reference \(prefill\)",
    "values_are_written_one_token_late": r"model.layers.0\S+ of DP0 rank 0 \S+ away .* \(prefill\)",
    "a_trial_breaks_off": r"no answer of model.layers.0\S+ of DP0 rank 0 \(AttributeError in CPU_ATTN: no such field\)",
}

Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=["auto", "fp8_e5m2", "fp8_e4m3"])
def answers(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What the engine answered under each sabotage, and under none."""
    folder: Path = tmp_path_factory.mktemp("probes")
    with lmcache_server(folder / "lmcache.log") as cache:
        ended = subprocess.run(
            [sys.executable, "-m", "support.kv_probe_engine", model, request.param, connector_config(cache.port)],
            capture_output=True, text=True, timeout=240, check=False,
            env=engine_environment(VLLM_ALLOW_INSECURE_SERIALIZATION="1"),
        )  # fmt: skip
    found = re.search(r"^found (.*)$", ended.stdout, re.MULTILINE)
    assert found, ended.stdout[-3000:] + ended.stderr[-6000:]
    answers: Answers = json.loads(found[1])
    return answers


def test_a_sound_engine_passes_before_and_after(answers: Answers) -> None:
    for moment in ("none", "after"):
        for name, judge in JUDGES.items():
            print(moment, json.dumps(judge([answers[moment][name]])))
        moved = answers[moment]["kv_round_trip"]["connector"]
        assert moved["tokens"] == 256
        assert answers[moment]["kv_round_trip"]["workers"][0]["said_by"] == "KVCacheProfile"


def test_once_the_gate_is_open_the_engine_refuses_probes(answers: Answers) -> None:
    assert "a control call of the smoke tests in phase 'serving'" in str(answers["open"]["kv_round_trip"])


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_sabotage_is_named(answers: Answers, sabotage: str) -> None:
    ((name, answer),) = answers[sabotage].items()
    with pytest.raises(CheckFailedError, match=VERDICTS[sabotage]) as failure:
        JUDGES[name]([answer])
    print(failure.value)
