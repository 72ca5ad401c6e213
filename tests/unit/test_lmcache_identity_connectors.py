"""The reference pair and the five guards that this work started from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from patches.framework.errors import MismatchError, ProfileError
from patches.lmcache_identity.connectors import AdaptiveCacheConnector, AlignedCacheConnector
from patches.lmcache_identity.layouts import LAYOUTS, Layout, layout_of
from patches.lmcache_identity.profile import KVCacheProfile, KVGroup

torch = pytest.importorskip("torch")

PROFILE = KVCacheProfile(
    cache_dtype="fp8_e5m2",
    dtype="bfloat16",
    layout=Layout.PACKED,
    weights="commit:" + "a" * 40,
    configuration="c" * 64,
    groups=(KVGroup(0, 0, ("layer.0", "layer.1"), "full_attention", 2, 64, 256, "uint8"),),
)
DTYPES = [
    "uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
]  # fmt: skip


def codes(*shape: int) -> Any:
    """Every byte value, over and over: as FP8 that is every number, both infinities and every NaN."""
    size = 1
    for length in shape:
        size *= length
    return torch.arange(size, dtype=torch.int64).remainder(256).to(torch.uint8).reshape(shape)


def same(one: Any, other: Any) -> bool:
    """Bit for bit, NaNs included."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and bool(torch.equal(one.view(torch.uint8), other.view(torch.uint8)))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_comes_back_bit_for_bit(name: str) -> None:
    """Guard 1: the FP8 round trip."""
    block = codes(2, 128, 128).view(getattr(torch, name))
    aligned = AlignedCacheConnector()
    aligned.put("key", block)
    assert same(aligned.get("key"), block)
    adaptive = AdaptiveCacheConnector(PROFILE)
    adaptive.put("key", block.view(torch.uint8))
    assert same(adaptive.get("key").view(block.dtype), block)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "uint8"])
def test_a_wrong_dtype_is_refused(name: str) -> None:
    """Guard 2."""
    block = torch.zeros((2, 128, 128), dtype=torch.uint8).to(getattr(torch, name))
    with pytest.raises(MismatchError, match="wanted uint8"):
        AdaptiveCacheConnector(PROFILE).put("key", block)


@pytest.mark.parametrize("shape", [(2, 128, 64), (4, 128, 128), (128, 2, 128), (2, 128, 2, 64), (2, 128)])
def test_a_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(MismatchError):
        AdaptiveCacheConnector(PROFILE).put("key", codes(*shape))


@pytest.mark.parametrize(("releases", "on_gpu", "on_cpu"), LAYOUTS)
def test_the_layout_of_any_known_release_is_resolved(releases: str, on_gpu: Layout, on_cpu: Layout) -> None:
    """Guard 3: no release's layout is guessed, and blocks of each go in and out."""
    first = releases.partition(",")[0].removeprefix(">=") + ".0"
    assert (layout_of(first, on_cpu=False), layout_of(first, on_cpu=True)) == (on_gpu, on_cpu)
    profile = replace(PROFILE, layout=on_gpu)
    connector = AdaptiveCacheConnector(profile)
    block = codes(*profile.block_shape(16))
    connector.put("key", block)
    assert same(connector.get("key"), block)


def test_an_unknown_model_is_refused() -> None:
    """Guard 4: without a profile there is no cache, instead of one with guessed shapes."""
    for unknown in (None, replace(PROFILE, groups=())):
        with pytest.raises(ProfileError, match="without the profile"):
            AdaptiveCacheConnector(unknown)
    with pytest.raises(ProfileError, match="no layer"):
        AdaptiveCacheConnector(PROFILE).put("key", codes(2, 16, 128), layer="layer.9")


@pytest.mark.parametrize("name", DTYPES)
def test_nothing_is_lost_in_silence(name: str) -> None:
    """Guard 5: what was accepted comes back whole, in every dtype that torch has; a later change does not show."""
    block = torch.zeros((2, 3, 8), dtype=torch.float32).to(getattr(torch, name))
    kept = block.clone()
    connector = AlignedCacheConnector()
    connector.put("key", block)
    block.view(torch.uint8).fill_(1)
    assert same(connector.get("key"), kept)
    connector.get("key").view(torch.uint8).fill_(1)
    assert same(connector.get("key"), kept)
    assert connector.get("another key") is None


def test_what_is_stored_is_held_against_the_profile_again_on_the_way_out() -> None:
    shared = AlignedCacheConnector()
    connector = AdaptiveCacheConnector(PROFILE, shared)
    shared.put(f"{PROFILE.fingerprint}/key", codes(2, 128, 64))
    with pytest.raises(MismatchError):
        connector.get("key")


def test_engines_that_differ_in_the_name_of_their_kv_format_alone_never_meet() -> None:
    """The fault at the heart: vLLM calls every one-byte format uint8, so dtype and shape are equal here."""
    shared = AlignedCacheConnector()
    e5m2, e4m3 = (AdaptiveCacheConnector(replace(PROFILE, cache_dtype=name), shared) for name in ("e5m2", "e4m3"))
    e5m2.put("key", codes(2, 128, 128))
    assert e4m3.get("key") is None
    assert AdaptiveCacheConnector(replace(PROFILE, cache_dtype="e5m2"), shared).get("key") is not None
