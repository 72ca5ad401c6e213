"""The V1 runner and TurboQuant on the real sources of the releases that have the fault (vllm#47604)."""

from __future__ import annotations

from typing import Any

import pytest
from support import releases

# The same run as for mla_kv_spec: a release is asked once a session.
PATCHES = "mla_kv_spec,turboquant_kv_spec"
SLOTS = {"turboquant_4bit_nc": 134, "turboquant_k8v4": 196}
BROKEN = ["0.25.1", *(pytest.param(release, marks=pytest.mark.full) for release in ("0.25.0", "0.26.0"))]


def layouts(release: str) -> Any:
    return releases.call(release, "support.kv_layout_probe:layouts", patches=PATCHES)


def shape(release: str, slot: int) -> list[int]:
    """128 blocks of 64 tokens and 2 heads; head-major from 0.26 on."""
    return [128, 64, 2, slot] if release < "0.26" else [128, 2, 64, slot]


@pytest.mark.parametrize("release", BROKEN)
@pytest.mark.parametrize("dtype", SLOTS)
def test_the_stock_v1_runner_asks_for_auto_and_dies_and_v2_does_not(release: str, dtype: str) -> None:
    found = layouts(release)["stock"][dtype]["128"]
    assert found["V1"].startswith("Unknown TurboQuant cache dtype: 'auto'. Valid presets: turboquant_k8v4")
    assert found["V2"] == shape(release, SLOTS[dtype])


@pytest.mark.parametrize("release", BROKEN)
@pytest.mark.parametrize("dtype", SLOTS)
def test_patched_both_runners_take_the_layout_of_the_configured_dtype(release: str, dtype: str) -> None:
    patched, stock = layouts(release)["patched"][dtype]["128"], layouts(release)["stock"][dtype]["128"]
    assert patched["V1"] == patched["V2"] == stock["V2"]
    assert patched["spec"] == stock["spec"]
    assert layouts(release)["states"]["turboquant_kv_spec"] == ["applied", ""]


@pytest.mark.parametrize("release", ["0.28.0", pytest.param("0.27.0", marks=pytest.mark.full)])
def test_where_upstream_has_healed_the_patch_is_inert_and_says_so(release: str) -> None:
    state, reason = layouts(release)["states"]["turboquant_kv_spec"]
    assert state == "inert"
    assert reason.startswith(f"vllm {release} is outside >=0.25,<0.27")


@pytest.mark.full
def test_the_first_healed_release_needs_no_patch() -> None:
    found = layouts("0.27.0")["stock"]["turboquant_4bit_nc"]["128"]
    assert found["mode"] == "TURBOQUANT"
    assert found["V1"] == found["V2"] == shape("0.27.0", 134)
