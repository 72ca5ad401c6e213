"""A worker's pool without the null block: what fits, and the numbers of a refusal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from patches.framework.errors import RefusedError
from patches.framework.records import Seam
from patches.kv_null_block.pool import WorkerPool
from patches.kv_null_block.wrappers import check_enough_kv_cache_memory

BLOCK = 16384
SIZES = st.integers(1, 2**40)


@given(capacity=SIZES, block=st.integers(1, 2**25), needed=SIZES)
def test_a_request_fits_where_one_block_is_left_over_and_nowhere_else(capacity: int, block: int, needed: int) -> None:
    refusal = WorkerPool(capacity, block).refusal(needed, 128, lambda _: 0)
    assert (refusal is None) == (needed + block <= capacity)


@given(blocks=st.integers(1, 10**6), block=st.integers(1, 2**25))
def test_what_the_refusal_asks_for_is_accepted(blocks: int, block: int) -> None:
    needed = blocks * block
    assert WorkerPool(needed, block).refusal(needed, 128, lambda _: 0) is not None
    assert WorkerPool(needed + block, block).refusal(needed, 128, lambda _: 0) is None


def test_the_longest_request_is_asked_for_what_is_usable() -> None:
    refusal = WorkerPool(8 * BLOCK, BLOCK).refusal(8 * BLOCK, 128, lambda memory: memory // BLOCK * 16)
    assert refusal is not None
    assert refusal.remedy.startswith("Set --max-model-len 112 or less")


def test_where_no_length_fits_none_is_recommended() -> None:
    refusal = WorkerPool(BLOCK, BLOCK).refusal(BLOCK, 16, lambda _: 0)
    assert isinstance(refusal, RefusedError)
    assert isinstance(refusal, ValueError)
    assert refusal.remedy.startswith("Give the cache more room")


def test_a_question_without_groups_gets_stocks_answer() -> None:
    asked = []
    check = check_enough_kv_cache_memory(Seam("module:name", lambda *given: asked.append(given), lambda: None))
    question = (8 * BLOCK, lambda: 8 * BLOCK, 128, lambda _: 0)
    check(*question)
    assert asked == [question]
