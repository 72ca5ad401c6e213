"""The pure budget: split once by DP, viewed by EP, equal everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.framework.errors import BudgetError
from patches.kv_budget.budget import (
    KVCacheBudget,
    RankBlocks,
    assert_kv_consistent_before_init,
    build_block_table,
    compute_kv_blocks,
)

CASES = json.loads((Path(__file__).parents[1] / "cases" / "kv_budget.json").read_text())["cases"]
PURE = [case for case in CASES if case.get("pure")]

dp_sizes = st.integers(1, 1024)
ep_sizes = st.integers(1, 256)
blocks = st.integers(1, 10**7)


def hold(case: dict[str, Any], ep_size: int) -> None:
    budget = KVCacheBudget(case["num_blocks_global"], case["dp_size"], ep_size, case["block_size"])
    budget.validate_all_ranks(RankBlocks(*report) for report in case["reports"])


@pytest.mark.parametrize("case", PURE, ids=lambda case: case["name"])
def test_case(case: dict[str, Any]) -> None:
    sizes = {"dp_size": case["dp_size"], "block_size": case["block_size"]}
    for ep_size in case["ep_sizes"]:
        if "error_names" not in case:
            found = compute_kv_blocks(case["num_blocks_global"], ep_size=ep_size, **sizes)
            assert set(found.values()) == {case["per_rank_blocks"]}
            assert len(found) == case["dp_size"] * ep_size
            continue
        with pytest.raises(BudgetError) as refused:
            hold(case, ep_size)
        for name in case["error_names"]:
            assert name in str(refused.value)


def test_dp_splits_once_and_never_twice() -> None:
    assert KVCacheBudget(4096, 2, 1, 16).per_dp_blocks == KVCacheBudget(4096, 2, 8, 16).per_dp_blocks == 2048


def test_ep_shrinks_neither_blocks_nor_heads() -> None:
    for ep_size in (1, 2, 8, 64):
        budget = KVCacheBudget(4096, 2, ep_size, 16)
        assert budget.per_ep_view_blocks == 2048
        assert budget.kv_heads(8, tp_size=2) == 4
        assert budget.kv_heads(2, tp_size=8) == 1
        with pytest.raises(BudgetError, match="8 KV heads over tensor_parallel_size=3"):
            budget.kv_heads(8, tp_size=3)


def test_a_global_number_that_does_not_divide_is_refused_with_the_next_one_that_does() -> None:
    with pytest.raises(BudgetError, match=r"4095 KV blocks do not divide.*Use 4094 blocks"):
        KVCacheBudget(4095, 2, 4, 16)


@pytest.mark.parametrize("field", ["num_blocks_global", "dp_size", "ep_size", "block_size"])
def test_numbers_below_one_are_refused_by_name(field: str) -> None:
    numbers = {"num_blocks_global": 4, "dp_size": 1, "ep_size": 1, "block_size": 16, field: 0}
    with pytest.raises(BudgetError, match=f"{field}=0"):
        KVCacheBudget(**numbers)


@given(st.lists(blocks, min_size=1, max_size=64), ep_sizes)
def test_uneven_ranks_get_the_floor_of_the_smallest(held: list[int], ep_size: int) -> None:
    budget = KVCacheBudget.of_smallest(held, ep_size=ep_size, block_size=16)
    assert budget.per_dp_blocks == min(held)
    assert budget.num_blocks_global == budget.per_dp_blocks * len(held)


@given(dp_sizes, ep_sizes, blocks)
def test_every_dp_and_ep_size_sees_one_number(dp_size: int, ep_size: int, per_rank: int) -> None:
    budget = KVCacheBudget(per_rank * dp_size, dp_size, ep_size, 16)
    assert budget.per_dp_blocks == budget.per_ep_view_blocks == per_rank
    assert budget.per_dp_tokens == per_rank * 16
    budget.validate_all_ranks([RankBlocks(dp_size - 1, ep_size - 1, per_rank, 16)])


@given(st.integers(2, 64), blocks, st.data())
def test_each_rank_that_differs_is_named_and_no_other(dp_size: int, per_rank: int, data: Any) -> None:
    wrong = data.draw(st.sets(st.integers(1, dp_size - 1), min_size=1))
    ranks = [RankBlocks(dp, 0, per_rank + (dp in wrong), 16) for dp in range(dp_size)]
    with pytest.raises(BudgetError) as refused:
        assert_kv_consistent_before_init(ranks)
    named = {dp for dp in range(dp_size) if f"dp {dp} ep" in str(refused.value)}
    assert named == wrong


def test_consistent_ranks_give_the_budget_that_they_have() -> None:
    ranks = [RankBlocks(dp, ep, 90, 16) for dp in range(3) for ep in range(2)]
    assert assert_kv_consistent_before_init(ranks) == KVCacheBudget(270, 3, 2, 16)


def test_no_rank_at_all_is_refused() -> None:
    with pytest.raises(BudgetError, match="no rank has reported"):
        assert_kv_consistent_before_init([])


def test_the_block_table_holds_null_blocks_for_every_sequence_that_fits() -> None:
    budget = KVCacheBudget(64, 2, 4, 16)
    table = build_block_table(budget, max_blocks_per_seq=8)
    assert budget.block_table_shape(8) == (32, 8) == table.shape
    assert table.dtype == "int32"
    assert not table.any()
