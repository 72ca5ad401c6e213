"""What a process took of a device that it shares, whatever the others do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.framework import process
from patches.framework.errors import RefusedError
from patches.framework.records import Seam
from patches.profiling_neighbour import wrappers
from patches.profiling_neighbour.own_memory import Snapshot, Taken, taken

GIB = 1 << 30
TOTAL = 80 * GIB

amounts = st.integers(0, 10 * GIB)


def snapshot(torch: int, other: int) -> Snapshot:
    return Snapshot(free=TOTAL - torch - other, torch=torch, other=other)


@given(weights=amounts, kept=amounts, context=amounts, buffers=amounts, neighbours=amounts)
def test_an_undisturbed_measurement_is_left_alone(
    weights: int, kept: int, context: int, buffers: int, neighbours: int
) -> None:
    start, loaded = snapshot(0, neighbours), snapshot(weights, neighbours + context)
    assert taken(start, loaded, snapshot(weights + kept, neighbours + context + buffers), weights) is None


@given(weights=amounts, kept=amounts, context=amounts, buffers=amounts, freed=st.tuples(amounts, amounts))
def test_what_a_neighbour_frees_is_neither_missed_for_long_nor_taken_for_ours(
    weights: int, kept: int, context: int, buffers: int, freed: tuple[int, int]
) -> None:
    """Noticed at the latest when it exceeds what this process took outside of torch; then torch's part is exact."""
    neighbours = sum(freed)
    start = snapshot(0, neighbours)
    loaded = snapshot(weights, neighbours - freed[0] + context)
    profiled = snapshot(weights + kept, context + buffers)
    found = taken(start, loaded, profiled, weights)
    assert (found is not None) == (neighbours > context + buffers)
    if found is not None:
        assert found.torch == weights + kept
        assert 0 <= found.other <= context + buffers
        assert found.total >= start.free - profiled.free


def test_the_issues_own_figures_with_a_model_of_two_gib() -> None:
    """vllm#56830: 82.94 GiB free, then 90.17."""
    start = Snapshot(int(82.94 * GIB), 0, 0)
    loaded = Snapshot(start.free - 2 * GIB - GIB // 2, 2 * GIB, GIB // 2)
    profiled = Snapshot(int(90.17 * GIB), 2 * GIB, start.free - 2 * GIB - int(90.17 * GIB))
    assert taken(start, loaded, profiled, 2 * GIB) == Taken(2 * GIB, GIB // 2)


def test_weights_in_an_allocator_that_torch_does_not_count_are_counted_once() -> None:
    start, loaded = snapshot(0, 20 * GIB), snapshot(0, 20 * GIB + 10 * GIB + GIB)
    profiled = snapshot(0, 15 * GIB)
    assert taken(start, loaded, profiled, 10 * GIB) == Taken(10 * GIB, GIB)


def test_a_neighbour_that_takes_memory_makes_the_process_take_less_never_more() -> None:
    start, loaded = snapshot(0, 10 * GIB), snapshot(2 * GIB, 14 * GIB)
    found = taken(start, loaded, snapshot(2 * GIB, 1 * GIB), 2 * GIB)
    assert found == Taken(2 * GIB, 4 * GIB)


def profiling(grown: int) -> Any:
    """vLLM's own measurement as since 0.27, of a device whose free memory grew by ``grown`` bytes."""

    @contextmanager
    def measure(before: Any, weights_memory: int = 0) -> Iterator[Any]:
        after = SimpleNamespace(free_memory=before.free_memory + grown, torch_memory=2 * GIB, non_torch_memory=0)
        result = SimpleNamespace(
            before_create=before, before_profile=after, after_profile=after, weights_memory=weights_memory,
            non_torch_increase=0, total_consumed=-grown, transient_peak_headroom=GIB, non_kv_cache_memory=GIB - grown,
        )  # fmt: skip
        yield result

    return wrappers.memory_profiling(Seam("memory_profiling", measure, lambda: None))


def device() -> Any:
    return SimpleNamespace(
        device_="cuda:0", free_memory=10 * GIB, torch_memory=0, non_torch_memory=30 * GIB, total_memory=40 * GIB
    )


def test_where_the_mode_only_reports_the_worker_goes_on_with_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[RefusedError] = []
    monkeypatch.setattr(process, "refuse", said.append)
    with profiling(20 * GIB)(device(), weights_memory=2 * GIB) as result:
        pass
    assert [type(error) for error in said] == [wrappers.ProfilingDisturbedError]
    assert (result.total_consumed, result.non_kv_cache_memory) == (2 * GIB, 3 * GIB)


@pytest.mark.parametrize(("limit", "refused"), [("0", True), ("0.24", True), ("0.25", False), ("1", False)])
def test_the_limit_is_a_share_of_the_device(monkeypatch: pytest.MonkeyPatch, limit: str, refused: bool) -> None:
    monkeypatch.setenv("SPLINT_PROFILING_GROWTH_LIMIT", limit)
    outcome = pytest.raises(wrappers.ProfilingDisturbedError) if refused else nullcontext()
    with outcome, profiling(10 * GIB)(device(), weights_memory=2 * GIB):
        pass


def test_an_error_of_the_profile_run_stays_the_error() -> None:
    with pytest.raises(ZeroDivisionError), profiling(30 * GIB)(device()):
        raise ZeroDivisionError
