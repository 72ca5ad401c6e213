"""The cases of the KV budget on vLLM's real planning code: its blocks are the agreed ones, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import releases

CASES = json.loads((Path(__file__).parents[1] / "cases" / "kv_budget.json").read_text())["cases"]
GROUPS = {case["name"]: case for case in CASES if "ranks" in case and "inert" not in case}
RELEASE = "0.32.0"
SUPPORT = str(Path(__file__).parents[1])
BREAK = """
from patches.kv_budget.budget import KVCacheBudget
KVCacheBudget.per_dp_blocks = property(lambda self: self.num_blocks_global // self.dp_size // self.dp_size)
"""


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "ranks": case["ranks"], "policy": case.get("policy", "align"), "pp": case.get("pp", 1),
        "override": case.get("num_gpu_blocks_override"), "auto": case.get("max_model_len") == "auto",
        "max_model_len": 4096 if case.get("max_model_len") == "auto" else 128,
    }  # fmt: skip


def planned(cases: dict[str, dict[str, Any]], first: str = "") -> Any:
    """Every case in one interpreter with the patch applied."""
    calls = {name: arguments(case) for name, case in cases.items()}
    code = f"""
    import json, sys
    sys.path.append({SUPPORT!r})
    import vllm.v1.core.kv_cache_utils
    {first.strip().replace(chr(10), chr(10) + "    ")}
    from support.kv_budget_probe import plan
    print(json.dumps({{name: plan(**case) for name, case in json.loads({json.dumps(calls)!r}).items()}}))
    """
    return releases.value(RELEASE, code, patches="kv_budget")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = planned(GROUPS)
    return found


@pytest.mark.parametrize("name", GROUPS)
def test_case(outcomes: dict[str, list[dict[str, Any]]], name: str) -> None:
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


def test_one_engine_alone_is_left_alone() -> None:
    case = next(case for case in CASES if case.get("inert"))
    code = f"""
    import json, sys
    sys.path.append({SUPPORT!r})
    import vllm.v1.core.kv_cache_utils
    from support.kv_budget_probe import plan_alone
    print(json.dumps(plan_alone({case["ranks"][0]})))
    """
    found = releases.value(RELEASE, code, patches="kv_budget")
    assert found == {"patched": case["blocks"] * 2, "stock": case["blocks"] * 2}


def test_breaking_the_budget_class_breaks_the_plan() -> None:
    """The blocks come from the class: where it splits twice, the ranks plan something else."""
    name = "two engines, one smaller"
    ranks = planned({name: GROUPS[name]}, BREAK)[name]
    assert [rank.get("blocks") for rank in ranks] != [[90], [90]]
