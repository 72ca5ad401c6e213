"""The scheduler's thresholds during the control of the KV series, and after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework.errors import ProbeError
from patches.kv_probe.chunking import in_blocks, whole


def engine(*, chunks: bool = True, threshold: int = 512, adaptive: bool = True) -> Any:
    config = SimpleNamespace(enable_chunked_prefill=chunks, long_prefill_token_threshold=threshold)
    groups = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size, has_layer_views=True), host_resident=False)
        for size in (16, 64)
    ]
    scheduler = SimpleNamespace(
        scheduler_config=config,
        adaptive_long_prefill_threshold=adaptive,
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
    )
    return SimpleNamespace(scheduler=scheduler)


def test_prefills_are_cut_into_the_largest_blocks_and_the_operators_thresholds_come_back() -> None:
    found = engine()
    assert in_blocks(found) == in_blocks(found) == {"chunk_tokens": 64}
    assert found.scheduler.adaptive_long_prefill_threshold is False
    assert whole(found) == whole(found) == {"chunk_tokens": 512}
    assert found.scheduler.adaptive_long_prefill_threshold is True


def test_a_scheduler_that_does_not_chunk_is_left_alone() -> None:
    found = engine(chunks=False)
    with pytest.raises(ProbeError, match="chunked prefill is off"):
        in_blocks(found)
    assert found.scheduler.scheduler_config.long_prefill_token_threshold == 512
