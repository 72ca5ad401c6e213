"""Known bytes in KV blocks, on real tensors: every layout that vLLM makes is a strided view of one allocation."""

from __future__ import annotations

import pytest
import torch

from patches.kv_probe.contents import VALUES, Blocks, Pages, layers_of

BLOCKS = 8
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32]
USED = Blocks((5, 2), seed=7)


def head_major(dtype: torch.dtype) -> torch.Tensor:
    """Pages of 2 heads, 16 tokens and 32 elements, each after a gap that belongs to another layer."""
    whole = torch.zeros((BLOCKS, 2, 2, 16, 32), dtype=torch.int8).repeat_interleave(dtype.itemsize, -1).view(dtype)
    return whole[:, 1]


def token_major(dtype: torch.dtype) -> torch.Tensor:
    return head_major(dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [head_major, token_major])
def test_bytes_come_back_in_every_dtype_and_layout_and_no_others_are_touched(layout, dtype) -> None:  # type: ignore[no-untyped-def]
    tensor = layout(dtype)
    pages = Pages("layer", tensor, BLOCKS)
    pages.write(USED)
    assert pages.block_bytes == 2 * 16 * 32 * dtype.itemsize
    assert pages.differing(USED) == 0
    untouched = [block for block in range(BLOCKS) if block not in USED.ids]
    assert not tensor.contiguous().view(torch.uint8)[untouched].any()


def test_every_value_of_a_byte_is_written_into_every_block() -> None:
    tensor = head_major(torch.float8_e5m2)
    Pages("layer", tensor, BLOCKS).write(USED)
    for block in USED.ids:
        assert len(tensor[block].contiguous().view(torch.uint8).unique()) == VALUES


def test_one_flipped_bit_is_one_differing_byte() -> None:
    tensor = head_major(torch.bfloat16)
    pages = Pages("layer", tensor, BLOCKS)
    pages.write(USED)
    tensor.view(torch.int16)[5, 1, 3, 4] ^= 1
    assert pages.differing(USED) == 1


def test_blocks_in_another_order_differ() -> None:
    pages = Pages("layer", head_major(torch.bfloat16), BLOCKS)
    pages.write(USED)
    assert pages.differing(Blocks((2, 5), seed=7)) > pages.block_bytes


def test_wiped_blocks_are_zeros() -> None:
    tensor = head_major(torch.float16)
    pages = Pages("layer", tensor, BLOCKS)
    pages.write(USED)
    pages.wipe(USED.ids)
    assert not tensor.contiguous().view(torch.uint8).any()


def test_two_layers_on_the_same_memory_overwrite_each_other() -> None:
    tensor = head_major(torch.bfloat16)
    layers = [Pages("first", tensor, BLOCKS), Pages("second", tensor, BLOCKS)]
    for layer in layers:
        layer.write(USED)
    assert [layer.differing(USED) > 0 for layer in layers] == [True, False]


def test_a_block_that_kernels_split_is_all_of_its_pages() -> None:
    pages = Pages("layer", torch.zeros((BLOCKS * 4, 2, 4, 32), dtype=torch.uint8), BLOCKS)
    pages.write(Blocks((1,), seed=0))
    assert pages.block_bytes == 4 * 2 * 4 * 32
    assert pages.differing(Blocks((1,), seed=0)) == 0


def test_pages_that_blocks_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="9 pages for 8 blocks"):
        Pages("layer", torch.zeros((9, 4)), BLOCKS)


def test_a_layer_may_keep_several_tensors() -> None:
    states = [torch.zeros((BLOCKS, 3)), torch.zeros((BLOCKS, 5), dtype=torch.bfloat16)]
    assert [pages.name for pages in layers_of({"mamba": states}, BLOCKS)] == ["mamba[0]", "mamba[1]"]


def test_a_layer_on_another_ones_cache_is_left_out_and_so_is_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from patches.kv_probe import lmcache, steps

    own = torch.zeros((BLOCKS, 2, 16, 32), dtype=torch.bfloat16)
    layers = {
        "own": SimpleNamespace(kv_cache=own),
        "shares": SimpleNamespace(kv_cache=own, kv_sharing_target_layer_name="own"),
        "without": SimpleNamespace(kv_cache=torch.tensor([])),
    }
    spec = SimpleNamespace(
        block_size=16, has_layer_views=True, tokens_per_state=1, num_heads=2, state_content_size_bytes=64, num_states=16
    )
    group = SimpleNamespace(layer_names=[*layers, "elsewhere"], kv_cache_spec=spec, host_resident=False)
    config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group])
    worker = SimpleNamespace(
        rank=3,
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)),
        model_runner=SimpleNamespace(kv_cache_config=config, attn_groups=[]),
    )
    monkeypatch.setattr(lmcache, "shard", lambda worker: worker.rank)
    found = steps.write(worker, [[4, 1]], seed=0)
    assert (found["layers"], found["left_out"]) == (1, ["shares", "without", "elsewhere"])
    assert found["differing"] == {}
    assert found["bytes_per_token"] == found["bytes_per_token_wanted"] == 128
    assert found["bytes_written"] == 2 * 16 * 128
