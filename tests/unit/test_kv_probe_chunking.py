"""The scheduler's thresholds during the control of the KV series, and after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework.errors import ProbeError
from patches.kv_probe.chunking import in_blocks, whole


def engine(*, chunks: bool = True, threshold: int = 512, adaptive: bool = True) -> Any:
    config = SimpleNamespace(enable_chunked_prefill=chunks, long_prefill_token_threshold=threshold)
    scheduler = SimpleNamespace(scheduler_config=config, adaptive_long_prefill_threshold=adaptive)
    cache = SimpleNamespace(block_size=16)
    return SimpleNamespace(scheduler=scheduler, vllm_config=SimpleNamespace(cache_config=cache))


def test_prefills_are_cut_into_blocks_and_the_operators_thresholds_come_back() -> None:
    found = engine()
    assert in_blocks(found) == in_blocks(found) == {"chunk_tokens": 16}
    assert found.scheduler.adaptive_long_prefill_threshold is False
    assert whole(found) == whole(found) == {"chunk_tokens": 512}
    assert found.scheduler.adaptive_long_prefill_threshold is True


def test_a_scheduler_that_does_not_chunk_is_left_alone() -> None:
    found = engine(chunks=False)
    with pytest.raises(ProbeError, match="chunked prefill is off"):
        in_blocks(found)
    assert found.scheduler.scheduler_config.long_prefill_token_threshold == 512
