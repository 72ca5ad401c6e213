"""The two collectives that vLLM's CPU communicator lacks, on real gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cpu_jobs import filled, gather, gather_one, moe_layer, reduce_scatter, traffic
from support.cpu_ranks import Ranks, ranks

RANKS = 3
ROW_TYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)
SUMMED_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32)

row_counts = st.one_of(st.sampled_from((0, 1)), st.integers(0, 70))
sizes_of_ranks = st.lists(row_counts, min_size=RANKS, max_size=RANKS)
row_shapes = st.lists(st.integers(1, 5), max_size=2).map(tuple)
specs_of_tensors = st.lists(st.tuples(st.sampled_from(ROW_TYPES), row_shapes), min_size=1, max_size=4)
on_real_ranks = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(RANKS, tmp_path_factory.mktemp("ranks"), patched=True) as group:
        yield group


def test_the_stock_communicator_has_neither_collective(tmp_path: Path) -> None:
    tensor = torch.zeros(2, 2)
    with ranks(1, tmp_path, patched=False) as stock:
        with pytest.raises(RuntimeError, match="rank 0: NotImplementedError"):
            stock.run(gather_one, [(tensor, None)])
        with pytest.raises(RuntimeError, match="rank 0: NotImplementedError"):
            stock.run(reduce_scatter, [(tensor, 0, None)])


@on_real_ranks
@given(sizes=sizes_of_ranks, specs=specs_of_tensors, data=st.data())
def test_gathering_concatenates_the_ranks_in_order(
    group: Ranks, sizes: list[int], specs: list[tuple[torch.dtype, tuple[int, ...]]], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, min(len(shape) for _, shape in specs)), label="dim")
    found = group.run(gather, [(specs, sizes, dim)] * RANKS)
    for i, spec in enumerate(specs):
        wanted = torch.cat([filled(spec, rows, 100 * rank + i) for rank, rows in enumerate(sizes)])
        for of_rank in found:
            assert of_rank[i].dtype == spec[0]
            assert torch.equal(of_rank[i], wanted)


@on_real_ranks
@given(rows=row_counts)
def test_gathering_without_sizes_takes_them_as_equal(group: Ranks, rows: int) -> None:
    tensors = [filled((torch.bfloat16, (4,)), rows, rank) for rank in range(RANKS)]
    for found in group.run(gather_one, [(tensor, None) for tensor in tensors]):
        assert torch.equal(found, torch.cat(tensors))


@on_real_ranks
@given(sizes=sizes_of_ranks, dtype=st.sampled_from(SUMMED_TYPES), shape=row_shapes, data=st.data())
def test_reduce_scatter_gives_each_rank_its_rows_of_the_sum(
    group: Ranks, sizes: list[int], dtype: torch.dtype, shape: tuple[int, ...], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(-1 - len(shape), len(shape)), label="dim")
    tensors = [filled((dtype, shape), sum(sizes), rank) for rank in range(RANKS)]
    moved = [tensor.movedim(0, dim) for tensor in tensors]
    found = group.run(reduce_scatter, [(tensor, dim, sizes) for tensor in moved])
    half = dtype in (torch.bfloat16, torch.float16)
    total = torch.stack(tensors).sum(0, dtype=torch.float32 if half else dtype).to(dtype)
    for part, wanted in zip(found, total.split(sizes), strict=True):
        assert part.dtype == dtype
        assert torch.equal(part.movedim(dim, 0), wanted)


def test_reduce_scatter_without_sizes_divides_equally(group: Ranks) -> None:
    tensor = torch.arange(RANKS * 2.0).view(-1, 1)
    found = group.run(reduce_scatter, [(tensor, 0, None)] * RANKS)
    assert torch.equal(torch.cat(found), RANKS * tensor)


def test_bfloat16_is_summed_in_float32(group: Ranks) -> None:
    """256 + 1 is 256 in bfloat16, so a sum in that type would stay there."""
    values = (256.0, 1.0, 1.0)
    found = group.run(reduce_scatter, [(torch.full((3, 1), value, dtype=torch.bfloat16), 0, None) for value in values])
    assert [part.item() for part in found] == [258.0] * RANKS


@pytest.mark.parametrize(
    ("job", "arguments", "message"),
    [
        (gather_one, (torch.zeros(2, 2), [2, 2]), "2 sizes for 3 ranks: pass one size a rank"),
        (gather_one, (torch.zeros(2, 2), [3, 3, 3]), "2 rows where the sizes say 3"),
        (reduce_scatter, (torch.zeros(4, 2), 0, [2, 2, 2]), "4 rows where the sizes say 6"),
        (reduce_scatter, (torch.zeros(4, 2), 0, None), "4 rows can't be divided equally between 3 ranks"),
    ],
)
def test_sizes_that_do_not_fit_are_named(
    group: Ranks, job: object, arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        group.run(job, [arguments] * RANKS)  # type: ignore[arg-type]


def test_a_layer_makes_two_collectives_whose_bytes_grow_linearly(group: Ranks) -> None:
    specs = [(torch.bfloat16, (64,)), (torch.float32, (2,)), (torch.int32, (2,))]
    row_bytes = 64 * 2 + 2 * 4 + 2 * 4
    for sizes in ([1, 1, 1], [40, 0, 2], [80, 0, 4], [0, 0, 0]):
        for own, found in zip(sizes, group.run(traffic, [(specs, sizes)] * RANKS), strict=True):
            assert found == {"calls": 2, "gather": sum(sizes) * row_bytes, "reduce": RANKS * own * 64 * 2}


@on_real_ranks
@given(sizes=sizes_of_ranks.filter(any))
def test_an_expert_parallel_layer_equals_the_dense_reference(group: Ranks, sizes: list[int]) -> None:
    from support.cpu_experts import Layer, reference, routed

    layer = Layer()
    found = group.run(moe_layer, [(layer, sizes, 11)] * RANKS)
    for rank, (rows, part) in enumerate(zip(sizes, found, strict=True)):
        wanted = reference(layer, routed(layer, rows, 11 + rank))
        torch.testing.assert_close(part.float(), wanted, atol=2e-2, rtol=2e-2)
