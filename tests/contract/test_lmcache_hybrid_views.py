"""Pages of an attention backend that are smaller than a hybrid model's blocks: LMCache sees whole blocks, unchanged.

Nothing of vllm-splint is in the way here: these tests hold what it relies on in LMCache 0.5.6 (LMCache#4247).
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("lmcache")
pytestmark = pytest.mark.filterwarnings("ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning")

BLOCK, PAGE, BLOCKS, HEADS, ROW = 544, 32, 3, 2, 128
"""The sizes of Qwen3.5-0.8B on FlashInfer: 17 pages of 32 tokens in a block of 544."""


def spec() -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=ROW // 2, dtype=torch.bfloat16)


def pages(order: str, count: int = BLOCKS * BLOCK // PAGE) -> tuple[Any, Any]:
    """The memory, and what vLLM registers: ``[pages, heads, tokens, keys and values]`` over either order of them."""
    memory = torch.arange(count * HEADS * PAGE * ROW, dtype=torch.int64).to(torch.int16).view(torch.bfloat16)
    if order == "HND":
        return memory, memory.view(count, HEADS, PAGE, ROW)
    return memory, memory.view(count, PAGE, HEADS, ROW).transpose(1, 2)


def edited(tensor: Any) -> Any:
    from lmcache.integration.vllm.kv_cache_group_edits import _SubpagedAttentionViewEdit

    edit = _SubpagedAttentionViewEdit()
    assert edit.matches(spec(), tensor)
    return edit.apply(spec(), tensor, {"kv_layout": "HND"})


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_view_of_whole_blocks_holds_the_bytes_of_their_pages(order: str) -> None:
    memory, registered = pages(order)
    whole = edited(registered)
    assert whole.shape[:3] == (BLOCKS, 2, BLOCK)
    assert whole.data_ptr() == memory.data_ptr()
    size = memory.numel() // BLOCKS
    for block in range(BLOCKS):
        own = memory[block * size : (block + 1) * size].view(torch.int16)
        assert torch.equal(whole[block].reshape(-1).view(torch.int16), own)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_block_that_is_written_through_the_view_leaves_its_neighbours_alone(order: str) -> None:
    memory, registered = pages(order)
    before = memory.view(torch.int16).clone()
    edited(registered)[1] = 0
    size = memory.numel() // BLOCKS
    changed = (memory.view(torch.int16) != before).nonzero().flatten()
    assert size <= changed.min()
    assert changed.max() < 2 * size


def test_pages_that_do_not_fill_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="is not a multiple of"):
        edited(pages("HND", BLOCKS * BLOCK // PAGE + 1)[1])


def test_pages_of_the_blocks_own_size_are_left_alone() -> None:
    from lmcache.integration.vllm.kv_cache_group_edits import _SubpagedAttentionViewEdit

    assert not _SubpagedAttentionViewEdit().matches(spec(), torch.zeros(1, HEADS, BLOCK, ROW, dtype=torch.bfloat16))
