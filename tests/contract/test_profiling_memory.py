"""What a GPU worker makes of its measure, and the engine of a number it was given (vllm#56830, vllm#22234).

The worker, its snapshots and the planning are each release's own. torch.cuda and the driver can't be asked anything
here: ``support.memory_probe`` answers for a device of 96 GiB, 83 GiB of them free, and moves a neighbour meanwhile.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.releases import call, every

INSTALLED = "0.32.0"
OTHERS = [release for release in every() if release != INSTALLED]
RELEASES = [INSTALLED, *(pytest.param(release, marks=pytest.mark.full) for release in OTHERS)]

GIB = 1 << 30
# 70 % of 96 GiB, less weights of 4 GiB, a CUDA context of half a GiB and activations of 2 GiB
FAIR_BYTES = int(96 * GIB * 0.7) - 4 * GIB - GIB // 2 - 2 * GIB


def outcomes(release: str) -> Any:
    return call(release, "support.memory_probe:outcomes", patches="profiling_neighbour,kv_override_check")


@pytest.mark.parametrize("release", RELEASES)
def test_both_patches_are_applied(release: str) -> None:
    states = outcomes(release)["states"]
    assert states["profiling_neighbour"][0] == states["kv_override_check"][0] == "applied"


@pytest.mark.parametrize("release", RELEASES)
def test_stock_ends_where_a_neighbour_frees_more_than_the_worker_took(release: str) -> None:
    said = outcomes(release)["stock"]["freed more than was taken"]
    assert said.startswith(
        "AssertionError: Error in memory profiling. Initial free memory 83.0 GiB, current free memory 86.5"
    )


@pytest.mark.parametrize("release", RELEASES)
def test_stock_gives_the_kv_cache_what_a_neighbour_freed(release: str) -> None:
    """Two gigabytes more than the share that --gpu-memory-utilization names, and nothing is said."""
    assert outcomes(release)["stock"]["freed less than was taken"] == FAIR_BYTES + 2 * GIB


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("scenario", ["alone", "freed less than was taken", "freed more than was taken"])
def test_the_kv_cache_is_what_it_would_be_without_the_neighbour(release: str, scenario: str) -> None:
    assert outcomes(release)["patched"][scenario] == FAIR_BYTES
    assert outcomes(release)["stock"]["alone"] == FAIR_BYTES


@pytest.mark.parametrize("release", RELEASES)
def test_growth_beyond_the_limit_is_refused_with_device_values_cause_and_remedy(release: str) -> None:
    said = outcomes(release)["patched"]["freed beyond the limit"]
    assert re.match(r"ProfilingDisturbedError: free memory on cuda:0 grew from 11\.00 to 22\.50 GiB", said)
    assert "another process gave up 11.50 GiB" in said
    assert "at most 6.00 GiB (SPLINT_PROFILING_GROWTH_LIMIT=0.25" in said
    assert "Start again when" in said


@pytest.mark.parametrize("release", RELEASES)
def test_bytes_that_the_device_does_not_have_are_refused(release: str) -> None:
    found = outcomes(release)
    assert found["stock"]["bytes that do not fit"] == 79 * GIB
    said = found["patched"]["bytes that do not fit"]
    assert said.startswith("KVCacheTooLargeError: --kv-cache-memory-bytes 84825604096 on worker 0 (cuda:0)")
    assert f"{83 * GIB - 4 * GIB - GIB // 2} bytes are free" in said
    assert found["patched"]["bytes that fit"] == 60 * GIB


@pytest.mark.parametrize("release", RELEASES)
def test_an_override_that_a_rank_can_not_hold_is_refused_by_name(release: str) -> None:
    found = outcomes(release)
    assert found["stock"]["override that does not fit"] == [200, 200]
    said = found["patched"]["override that does not fit"]
    assert "needs 3276800 bytes of KV cache on DP1 worker 1, which has 1474560" in said
    assert "at most 90 blocks of 16384 bytes" in said


@pytest.mark.parametrize("release", RELEASES)
def test_what_fits_is_allocated_as_in_stock(release: str) -> None:
    found = outcomes(release)
    for plan in ("override that fits", "no override"):
        assert found["patched"][plan] == found["stock"][plan] == [90, 90]
