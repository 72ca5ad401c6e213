"""KV cache by number, against the bytes that are there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.kv_override_check.limits import (
    KVCacheTooLargeError,
    check_bytes,
    check_override,
    planned_bytes,
    worker_name,
)

amounts = st.integers(0, 1 << 40)


@given(blocks=st.integers(1, 1 << 20), block=st.integers(1, 1 << 24), available=st.integers(-(1 << 30), 1 << 44))
def test_an_override_is_refused_exactly_where_its_bytes_are_not_there(blocks: int, block: int, available: int) -> None:
    if blocks * block <= available:
        check_override(blocks, block, available, "DP0")
        return
    with pytest.raises(KVCacheTooLargeError) as caught:
        check_override(blocks, block, available, "DP0")
    fitting = int(caught.value.wanted.split()[2])
    assert fitting == max(0, available // block), "what the message offers fits, and one more does not"


def test_the_message_has_the_rank_the_bytes_needed_and_the_bytes_there() -> None:
    with pytest.raises(
        KVCacheTooLargeError, match=r"needs 3276800 bytes .* on DP1, which has 1474560.*Lower --num-gpu-bl"
    ):
        check_override(200, 16384, 1474560, "DP1")


@given(wanted=amounts, free=amounts)
def test_bytes_are_refused_exactly_where_they_are_not_free(wanted: int, free: int) -> None:
    if wanted <= free:
        check_bytes(wanted, free, "worker 0")
        return
    with pytest.raises(KVCacheTooLargeError, match=f"bytes {wanted} on worker 0, where {free} bytes"):
        check_bytes(wanted, free, "worker 0")


def tensor(size: int, **fields: object) -> SimpleNamespace:
    return SimpleNamespace(size=size, **fields)


@pytest.mark.parametrize(
    ("tensors", "total"),
    [
        ([], 0),
        ([tensor(10), tensor(10)], 20),
        ([tensor(10, block_stride=0), tensor(10, block_stride=0)], 20),
        ([tensor(30, block_stride=3), tensor(30, block_stride=3)], 30),
        ([tensor(30, layers=["a"], block_stride=3), tensor(30, layers=["b"], block_stride=3)], 30),
        ([tensor(30, layers=["a"], host_resident=False), tensor(90, layers=["b"], host_resident=True)], 30),
    ],
)
def test_bytes_of_a_plan_are_those_that_the_release_allocates(tensors: list[SimpleNamespace], total: int) -> None:
    assert planned_bytes(tensors) == total


@pytest.mark.parametrize(
    ("size", "index", "name"),
    [(1, 0, "worker 3"), (2, 0, "DP0 worker 3"), (2, 1, "DP1 worker 3"), (1, 1, "DP1 worker 3")],
)
def test_workers_are_named_by_rank_where_there_are_several_engines(size: int, index: int, name: str) -> None:
    assert worker_name(SimpleNamespace(data_parallel_size=size, data_parallel_index=index), 3) == name
