"""Blocks that a probe borrows from vLLM's own pool come back, zeroed, whatever happens to the probe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework.errors import ProbeError
from patches.kv_probe import attention
from patches.kv_probe.blocks import borrowed, spans
from patches.kv_probe.probes import run

FREE = 7  # of 8: vLLM keeps the null block


@pytest.fixture
def engine() -> Any:
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(8, enable_caching=True, hash_block_size=16)
    manager = SimpleNamespace(block_pool=pool)
    return SimpleNamespace(
        scheduler=SimpleNamespace(kv_cache_manager=manager, has_unfinished_requests=lambda: False),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=1)),
    )


def free(engine: Any) -> int:
    return int(engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def test_groups_get_blocks_of_their_own_and_give_them_back_wiped(engine: Any) -> None:
    wiped: list[Any] = []
    with borrowed(engine, [2, 0, 3], wiped.append) as groups:
        assert [len(group) for group in groups] == [2, 0, 3]
        assert len({block for group in groups for block in group}) == 5
        assert 0 not in {block for group in groups for block in group}, "the null block is nobody's"
        assert free(engine) == FREE - 5
    assert wiped == [groups]
    assert free(engine) == FREE


def test_a_probe_that_fails_gives_its_blocks_back_and_so_does_a_wipe_that_fails(engine: Any) -> None:
    def wipe(_groups: Any) -> None:
        raise RuntimeError("no worker")

    with pytest.raises(RuntimeError, match="no worker"), borrowed(engine, [4], wipe):
        raise ProbeError("a failed load", "a finished one", "Look.")
    assert free(engine) == FREE


def test_too_few_blocks_are_said_and_none_is_taken(engine: Any) -> None:
    with pytest.raises(ProbeError, match="7 free KV blocks"), borrowed(engine, [5, 5], print):
        raise AssertionError("not reached")
    assert free(engine) == FREE


def test_while_requests_run_nothing_is_probed(engine: Any) -> None:
    engine.scheduler.has_unfinished_requests = lambda: True
    assert run(engine, "kv_round_trip") == {"dp_rank": 1, "busy": True}


def test_groups_without_pages_of_their_own_are_left_out() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, HiSparseHotSpec

    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    hot = HiSparseHotSpec(block_size=1, page_size=64, blocks_per_request=1)
    groups = [SimpleNamespace(kv_cache_spec=spec, host_resident=host) for spec, host in
              ((full, False), (full, True), (hot, False))]  # fmt: skip
    assert spans(SimpleNamespace(kv_cache_groups=groups)) == [16, 0, 0]


def test_a_back_end_that_can_not_be_called_alone_is_a_reason_not_a_fault() -> None:
    class Trial:
        layer = SimpleNamespace(layer_name="layer.0", attn_backend=SimpleNamespace(get_name=lambda: "OTHER_ATTN"))

        def run(self) -> Any:
            raise TypeError("build() needs a workspace")

    layers: dict[str, Any] = {}
    reason = attention._try(Trial(), layers)  # type: ignore[arg-type]
    assert (reason, layers) == ("OTHER_ATTN can't be tried alone: TypeError: build() needs a workspace", {})
