"""``splint plan`` against vLLM's own classes: every weight, every cache, every stage of real models' configurations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import plan_on_vllm, releases
from support.model_configs import CONFIGS

from entrypoint.planning import architectures
from entrypoint.planning.cache import layer_caches
from entrypoint.planning.split import Split
from entrypoint.planning.weights import ABSORBED, stage_weights

pytest.importorskip("vllm")
TESTS = Path(__file__).parents[1]


EVERY = [
    pytest.param(case, marks=() if case in plan_on_vllm.QUICK else pytest.mark.full) for case in plan_on_vllm.CASES
]


@pytest.fixture(scope="module")
def vllm_says(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    amount = [] if request.config.getoption("--run-full") else ["quick"]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "support.plan_on_vllm", str(tmp_path_factory.mktemp("models")), *amount],
        env={**os.environ, "SPLINT_MODE": "off", "PYTHONPATH": path},
        capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return said


@pytest.fixture
def seen(vllm_says: dict[str, Any], case: plan_on_vllm.Case) -> dict[str, Any]:
    (found,) = (entry for entry in vllm_says["cases"] if tuple(entry["case"]) == case)
    return dict(found)


def _split(case: plan_on_vllm.Case) -> tuple[Split, range]:
    model, tp, pp, dp, expert_parallel, rank = case
    shape = architectures.shape(CONFIGS[model])
    split = Split(tp, pp, dp, expert_parallel, shape.experts is not None)
    return split, split.stages(shape.layers)[rank // tp % pp]


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_weights_of_a_device_are_those_of_the_real_model_to_the_byte(
    seen: dict[str, Any], case: plan_on_vllm.Case
) -> None:
    split, layers = _split(case)
    planned = stage_weights(architectures.shape(CONFIGS[case[0]]), split, layers, 2)
    made_after_loading = planned.pop(ABSORBED, 0)
    assert (made_after_loading > 0) == (case[0] == "deepseek-v3")
    assert sum(planned.values()) == seen["weights"]


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_caches_are_the_real_layers_own_in_every_kv_dtype(seen: dict[str, Any], case: plan_on_vllm.Case) -> None:
    split, layers = _split(case)
    shape = architectures.shape(CONFIGS[case[0]])
    planned = layer_caches(shape, split, layers, "bfloat16", "auto")
    assert sorted(cache.name for cache in planned) == seen["caches"]
    assert seen["specs"] == dict.fromkeys(seen["specs"], True)
    assert len(seen["specs"]) >= 2


def test_a_configuration_reads_the_same_as_transformers_saves_it(vllm_says: dict[str, Any]) -> None:
    assert vllm_says["saved"] == dict.fromkeys(CONFIGS, True)


@pytest.mark.parametrize("case", [case for case in plan_on_vllm.CASES if case[1:4] == (1, 1, 1)], ids=str)
def test_longest_sequence_is_the_one_that_vllm_derives(seen: dict[str, Any], case: plan_on_vllm.Case) -> None:
    assert architectures.shape(CONFIGS[case[0]]).max_len == seen["max_model_len"]


def test_sparse_attention_takes_656_bytes_and_132_for_its_indexer(vllm_says: dict[str, Any]) -> None:
    assert vllm_says["sparse"] == {"latent": True, "index": True, "bytes": [656, 132]}


def test_pipeline_stages_are_vllms(vllm_says: dict[str, Any]) -> None:
    for layers, pp, stages in vllm_says["stages"]:
        assert [[stage.start, stage.stop] for stage in Split(pp=pp).stages(layers)] == stages


def _check(found: list[tuple[bool, bool, int]]) -> None:
    assert len(found) == 3 * len(plan_on_vllm.BLOCKS_OF)
    assert all(blocks and concurrency for blocks, concurrency, _ in found), found
    assert {pure for *_, pure in found} == {1000, 999}


def test_bytes_become_blocks_as_in_the_engines_own_planning_code(vllm_says: dict[str, Any]) -> None:
    _check(vllm_says["blocks"])


@pytest.mark.full
@pytest.mark.parametrize("release", ["0.19.1", "0.22.1", "0.25.1", "0.28.0", "0.30.0", "0.33.0"])
def test_bytes_become_blocks_as_in_other_releases_planning_code(release: str) -> None:
    code = f"""
        import json, sys
        sys.path += {[str(TESTS.parent), str(TESTS)]!r}
        from entrypoint.planning import engine
        from support import plan_on_vllm
        print(json.dumps([engine.release(), plan_on_vllm.blocks()]))
    """
    known, found = releases.value(release, code)
    assert known is not None
    _check(found)
