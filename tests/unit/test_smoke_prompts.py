from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.smoke.prompts import Shape, Tokens, shape
from patches.serving_gate.plan import SmokePlan

PLAN = SmokePlan(
    base_url="http://127.0.0.1:1", secret="s", model="m", runner="generate", max_model_len=2048, block_size=16,
    vocab_size=512, prefix_caching=True, dp_ranks=(0,), cache_dtype="auto", expected_roster=(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("block", "chunk", "length", "wanted"),
    [
        (16, 256, 2048, Shape(512, 14)),  # two chunks
        (128, 128, 2048, Shape(256, 126)),  # the CPU backend
        (16, 256, 400, Shape(256, 14)),  # room for one chunk
        (16, 256, 100, Shape(32, 14)),  # room for blocks only
        (16, None, 2048, Shape(32, 14)),  # no LMCache
        (16, 256, 16, None),
    ],
)
def test_prompt_fits_the_context_and_fills_blocks_and_chunks(
    block: int, chunk: int | None, length: int, wanted: Shape | None
) -> None:
    assert shape(replace(PLAN, block_size=block, chunk_tokens=chunk, max_model_len=length)) == wanted


@given(st.sampled_from([1, 8, 16, 64, 128, 528]), st.sampled_from([None, 128, 256, 528]), st.integers(1, 5000))
def test_generated_tokens_never_leave_the_context(block: int, chunk: int | None, length: int) -> None:
    found = shape(replace(PLAN, block_size=block, chunk_tokens=chunk, max_model_len=length))
    assert found is None or found.cached + found.tail + PLAN.generated <= length


@given(st.integers(1, 300_000))
def test_token_ids_are_in_the_vocabulary(size: int) -> None:
    assert all(0 <= token < size for token in Tokens(size).prompt(20))


def test_special_tokens_at_the_ends_of_the_vocabulary_are_left_out() -> None:
    ids = Tokens(1000).prompt(500)
    assert min(ids) >= 125
    assert max(ids) < 500
