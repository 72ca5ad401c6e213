"""vllm#47722 on the real sources of the releases that have it: fp8_ds_mla, allocated with 656 bytes a token."""

from __future__ import annotations

from typing import Any

import pytest
from support import releases

PATCHES = "mla_kv_spec,turboquant_kv_spec"
BYTES = {32: 1343488, 128: 5373952, 192: 8060928, 512: 21495808}
BROKEN = ["0.25.1", pytest.param("0.25.0", marks=pytest.mark.full)]
HEALED = ["0.28.0", pytest.param("0.26.0", marks=pytest.mark.full)]


def layouts(release: str) -> Any:
    return releases.call(release, "support.kv_layout_probe:layouts", patches=PATCHES)


@pytest.mark.parametrize("release", BROKEN)
@pytest.mark.parametrize("blocks", BYTES)
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_stock_views_656_bytes_as_576_and_dies_with_the_reported_words(release: str, blocks: int, runner: str) -> None:
    found = layouts(release)["stock"]["sparse fp8"][str(blocks)]
    assert found[runner] == f"shape '[{blocks}, 64, 576]' is invalid for input of size {BYTES[blocks]}"
    assert found["mode"] == "NONE"


@pytest.mark.parametrize("release", BROKEN)
@pytest.mark.parametrize("blocks", BYTES)
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_patched_it_is_viewed_as_it_was_allocated_and_the_page_stays(release: str, blocks: int, runner: str) -> None:
    found = layouts(release)["patched"]["sparse fp8"][str(blocks)]
    assert found[runner] == [blocks, 64, 656]
    assert found["page"] == 41984
    assert blocks * found["page"] == BYTES[blocks]
    assert layouts(release)["states"]["mla_kv_spec"] == ["applied", ""]


@pytest.mark.parametrize("release", BROKEN)
@pytest.mark.parametrize(("layer", "page"), [("sparse bf16", 73728), ("dense fp8", 36864)])
def test_every_other_layout_is_left_as_it_was(release: str, layer: str, page: int) -> None:
    patched, stock = layouts(release)["patched"][layer]["128"], layouts(release)["stock"][layer]["128"]
    assert patched == stock
    assert patched["page"] == page
    assert patched["V1"] == patched["V2"] == [128, 64, 576]


@pytest.mark.parametrize("release", HEALED)
def test_where_upstream_has_healed_the_patch_is_inert_and_says_so(release: str) -> None:
    found = layouts(release)
    state, reason = found["states"]["mla_kv_spec"]
    assert state == "inert"
    assert reason.startswith(f"vllm {release} is outside >=0.25,<0.26")
    for layer in ("sparse fp8", "sparse bf16", "dense fp8"):
        assert found["patched"][layer] == found["stock"][layer]
    assert found["stock"]["sparse fp8"]["128"]["V1"] == [128, 64, 656]
