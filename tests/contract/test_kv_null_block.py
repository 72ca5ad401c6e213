"""vllm#35541 on the real sources of every release that has it: the null block, counted as room for a request.

Four layers of 4096 bytes a block, blocks of 16 tokens: a request of 128 tokens needs 8 blocks of 16384 bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
from support import releases

BROKEN = ("0.19.1", "0.25.1", "0.28.0")
OTHERS = (
    "0.19.0", "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.26.0",
    "0.27.0", "0.27.1",
)  # fmt: skip
HEALED = ("0.30.0", pytest.param("0.29.0", marks=pytest.mark.full), pytest.param("0.32.0", marks=pytest.mark.full))
EVERY = pytest.mark.parametrize(
    "release", [*BROKEN, *(pytest.param(release, marks=pytest.mark.full) for release in OTHERS)]
)
# Up to 0.20.0 vLLM checks the memory that it measured, and then plans num_gpu_blocks_override blocks whatever it found.
OVERRIDE_AFTER_CHECK = ("0.19.0", "0.19.1", "0.20.0")


def planning(release: str) -> Any:
    return releases.call(release, "support.kv_planning_probe:planning", patches="kv_null_block")


def plan(blocks: int, tokens: int, workers: int = 1) -> dict[str, Any]:
    return {"blocks": [blocks] * workers, "tokens": tokens}


@EVERY
def test_the_pool_hands_out_one_block_less_so_a_request_that_fits_exactly_never_gets_its_slots(release: str) -> None:
    assert planning(release)["waiting"] == {"8": {"free": 7, "given": False}, "9": {"free": 8, "given": True}}


@EVERY
def test_stock_accepts_the_exact_fit(release: str) -> None:
    stock = planning(release)["stock"]
    assert stock["8 blocks"] == stock["override 8"] == plan(8, 128)
    assert stock["workers with 9 and 8"] == plan(8, 128, workers=2)
    assert stock["auto, 8 blocks"] == plan(8, 128)
    assert stock["auto, 7 blocks"] == plan(7, 112)


@EVERY
@pytest.mark.parametrize("scenario", ["8 blocks", "nearly 9 blocks", "override 8", "workers with 9 and 8"])
def test_patched_the_exact_fit_is_refused_with_the_numbers(release: str, scenario: str) -> None:
    found = planning(release)["patched"][scenario]
    assert found["kind"] == "PoolTooSmallError"
    assert "the KV cache has 8 blocks of 16384 bytes, a request of max_model_len (128 tokens) needs 8" in found["error"]
    assert "wanted at least 9 blocks, 147456 bytes. Set --max-model-len 112 or less" in found["error"]


@EVERY
def test_patched_one_block_more_is_enough(release: str) -> None:
    patched = planning(release)["patched"]
    assert patched["9 blocks"] == patched["override 9"] == plan(9, 128)


@EVERY
def test_patched_the_fitted_length_leaves_the_null_block_out(release: str) -> None:
    patched = planning(release)["patched"]
    assert patched["auto, 8 blocks"] == patched["auto, override 8"] == plan(8, 112)
    assert patched["auto, 7 blocks"] == plan(7, 96)
    assert patched["auto, workers with 9 and 8"] == plan(8, 112, workers=2)
    assert patched["auto, 1 block"]["error"].startswith("Cannot auto-fit max_model_len")


@EVERY
def test_where_memory_is_lacking_altogether_the_words_are_stocks_and_the_advice_leaves_the_null_block_out(
    release: str,
) -> None:
    patched, stock = planning(release)["patched"], planning(release)["stock"]
    assert patched["nothing"] == stock["nothing"]
    assert "the estimated maximum model length is 112." in stock["7 blocks"]["error"]
    assert patched["7 blocks"] == {**stock["7 blocks"], "error": stock["7 blocks"]["error"].replace("112", "96")}


@EVERY
def test_an_override_that_holds_no_request_at_all_is_refused(release: str) -> None:
    found = planning(release)
    if release in OVERRIDE_AFTER_CHECK:
        assert found["stock"]["override 4"] == plan(4, 128)
        assert found["stock"]["auto, override 8"] == plan(8, 1600)
        assert "has 4 blocks of 16384 bytes" in found["patched"]["override 4"]["error"]
    else:
        assert found["patched"]["override 4"]["kind"] == found["stock"]["override 4"]["kind"] == "ValueError"


@EVERY
def test_patched_the_release_decides_every_case_as_the_healed_ones_do(release: str) -> None:
    healed = planning("0.30.0")["stock"]
    for scenario, found in planning(release)["patched"].items():
        assert found == healed[scenario] or {"error"} <= found.keys() & healed[scenario].keys(), scenario


@EVERY
def test_the_bytes_of_a_block_are_those_that_vllm_plans_in_every_grouping(release: str) -> None:
    found = planning(release)
    blocks = found["bytes of a block"]
    assert [kind for kind, block in blocks.items() if block["packed"]] == (["packed"] if release >= "0.24" else [])
    assert len(blocks) == 4
    for kind, block in blocks.items():
        assert block["found"] == block["planned"], kind
        assert block["capacity in blocks"] == block["override afterwards"] == 5
    assert found["states"]["kv_null_block"] == ["applied", ""]
    assert all(found["calls"].values())


@pytest.mark.parametrize("release", HEALED)
def test_where_upstream_has_healed_the_patch_is_inert_and_says_so(release: str) -> None:
    found = planning(release)
    state, reason = found["states"]["kv_null_block"]
    assert state == "inert"
    assert reason.startswith(f"vllm {release} is outside >=0.19,<0.29")
    assert found["patched"] == found["stock"]
    assert found["stock"]["8 blocks"]["kind"] == "ValueError"
    assert found["stock"]["9 blocks"] == plan(9, 128)
    assert found["stock"]["auto, 8 blocks"] == plan(8, 112)
