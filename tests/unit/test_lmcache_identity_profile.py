"""The profile and its fingerprint: what makes another one, and what does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.framework.errors import MismatchError, ProfileError
from patches.lmcache_identity.layouts import ITEM_BYTES, Layout, layout_of
from patches.lmcache_identity.profile import LONGEST_MODEL, KVCacheProfile, KVGroup, check_block, key_name

GROUP = KVGroup(0, 0, ("model.layers.0.attn", "model.layers.1.attn"), "full_attention", 2, 64, 256, "uint8")
LATENT = KVGroup(0, 0, ("model.layers.0.attn",), "mla_attention", 1, 576, 1152, "bfloat16")
PROFILE = KVCacheProfile(
    cache_dtype="fp8_e5m2",
    dtype="bfloat16",
    layout=Layout.PACKED,
    weights="commit:" + "a" * 40,
    configuration="c" * 64,
    groups=(GROUP,),
)

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
sizes = st.integers(1, 256)
groups = st.builds(
    KVGroup,
    stage=st.integers(0, 3),
    index=st.integers(0, 3),
    layers=st.lists(names, min_size=1, max_size=4, unique=True).map(tuple),
    kind=st.sampled_from(["full_attention", "sliding_window", "mamba"]),
    heads=sizes,
    head_dim=sizes,
    row_bytes=sizes.map(lambda size: 16 * size),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    quantisation=names,
)
profiles = st.builds(
    KVCacheProfile,
    cache_dtype=names,
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    layout=st.sampled_from(Layout),
    weights=names,
    configuration=names,
    weight_quantisation=names,
    scales=st.just("checkpoint"),
    draft=names,
    tensor_parallel=sizes,
    pipeline_parallel=sizes,
    groups=st.lists(groups, min_size=1, max_size=3).map(tuple),
)


@given(profiles)
def test_the_fingerprint_is_short_versioned_and_safe_in_keys_urls_and_file_names(profile: KVCacheProfile) -> None:
    assert re.fullmatch(r"kv1-[0-9a-f]{12}", profile.fingerprint)


@given(profiles)
def test_an_equal_profile_has_the_same_fingerprint(profile: KVCacheProfile) -> None:
    assert replace(profile).fingerprint == profile.fingerprint


@given(profiles, profiles)
def test_two_profiles_that_differ_have_two_fingerprints(one: KVCacheProfile, other: KVCacheProfile) -> None:
    assert (one.fingerprint == other.fingerprint) == (one == other)


def _changed(value: Any) -> Any:
    if isinstance(value, Layout):
        return Layout.SPLIT
    if isinstance(value, int):
        return value + 1
    return (*value, ("more", "1")) if isinstance(value, tuple) else value + "x"


@pytest.mark.parametrize("name", [field.name for field in fields(KVCacheProfile) if field.name != "groups"])
def test_every_field_of_the_profile_is_in_the_fingerprint(name: str) -> None:
    changed = replace(PROFILE, **{name: _changed(getattr(PROFILE, name))})
    assert changed.fingerprint != PROFILE.fingerprint


@pytest.mark.parametrize("name", [field.name for field in fields(KVGroup)])
def test_every_field_of_a_group_is_in_the_fingerprint(name: str) -> None:
    changed = replace(GROUP, **{name: _changed(getattr(GROUP, name))})
    assert replace(PROFILE, groups=(changed,)).fingerprint != PROFILE.fingerprint


def test_which_stage_holds_which_layers_is_in_the_fingerprint() -> None:
    """The same layers, divided otherwise among the stages: equal ranks would hold other layers under one key."""
    first, second = (replace(GROUP, layers=(layer,)) for layer in GROUP.layers)
    even = replace(PROFILE, groups=(first, replace(second, stage=1)))
    assert even.fingerprint != replace(PROFILE, groups=(replace(first, stage=1), second)).fingerprint


def test_ranks_that_hold_the_same_latent_vectors_share_whatever_their_number() -> None:
    latent = replace(PROFILE, groups=(LATENT,))
    assert latent.fingerprint == replace(latent, tensor_parallel=8).fingerprint
    assert PROFILE.fingerprint != replace(PROFILE, tensor_parallel=8).fingerprint


def test_a_fingerprint_is_the_same_in_processes_with_different_hash_seeds() -> None:
    code = f"""
from patches.lmcache_identity.profile import KVCacheProfile, KVGroup
from patches.lmcache_identity.layouts import Layout
print(({PROFILE!r}).fingerprint)
""".replace("<Layout.PACKED: 'packed'>", "Layout.PACKED")
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for seed in ("0", "1", "random")
    }  # fmt: skip
    assert found == {PROFILE.fingerprint}


def test_the_fingerprint_of_a_known_profile_stays_what_it_is() -> None:
    """Whoever changes this makes every stored object unreachable: raise VERSION with it, and say so."""
    assert PROFILE.fingerprint == "kv1-183e915b3b4e"


def test_scales_that_are_computed_at_run_time_can_not_be_named() -> None:
    with pytest.raises(ProfileError, match="calculate_kv_scales"):
        _ = replace(PROFILE, scales="run-time").fingerprint


def test_a_checkpoint_with_its_own_kv_scheme_turns_auto_into_fp8() -> None:
    auto = replace(PROFILE, cache_dtype="bfloat16", groups=())
    quantised = replace(GROUP, quantisation="FP8_PER_TENSOR")
    assert auto.with_groups([quantised], "fp8_e4m3fnuz").cache_dtype == "fp8_e4m3fnuz"
    assert auto.with_groups([GROUP]).cache_dtype == "bfloat16"
    assert replace(auto, cache_dtype="fp8_e5m2").with_groups([quantised]).cache_dtype == "fp8_e5m2"


def test_the_profile_is_described_in_json_and_in_a_line() -> None:
    told = json.loads(json.dumps(PROFILE.describe()))
    assert told["fingerprint"] == PROFILE.fingerprint
    assert told["summary"] == "fp8_e5m2 · 2 x full_attention 2 x 64 · 512 B a token · packed · TP1 PP1 DCP1"
    assert replace(PROFILE, groups=(replace(GROUP, tokens_per_state="4"),)).token_bytes == 128
    assert replace(PROFILE, groups=(replace(GROUP, kind="mamba", tokens_per_state="-1"),)).token_bytes == 0


@pytest.mark.parametrize(
    ("layout", "group", "shape"),
    [
        (Layout.PACKED, GROUP, (2, 128, 128)),
        (Layout.BLOCK_SPLIT, GROUP, (2, 128, 2, 64)),
        (Layout.SPLIT, GROUP, (2, 128, 2, 64)),
        (Layout.PACKED, LATENT, (1, 128, 576)),
        (Layout.SPLIT, LATENT, (128, 576)),
    ],
)
def test_the_shape_of_a_block_follows_layout_and_group(layout: Layout, group: KVGroup, shape: tuple[int, ...]) -> None:
    profile = replace(PROFILE, layout=layout, groups=(group,))
    assert profile.block_shape(128) == shape
    check_block(profile, group.dtype, shape)


@given(profiles, st.integers(1, 4096))
def test_a_block_of_the_profiles_shape_is_admitted_and_weighs_what_the_profile_says(
    profile: KVCacheProfile, tokens: int
) -> None:
    group = profile.groups[0]
    heads = group.heads if profile.layout is Layout.PACKED else 2 * group.heads
    row = group.row_bytes * heads * ITEM_BYTES[group.dtype]
    whole = replace(profile, groups=(replace(group, row_bytes=row),))
    shape = whole.block_shape(tokens)
    check_block(whole, group.dtype, shape)
    elements = 1
    for size in shape:
        elements *= size
    assert elements * ITEM_BYTES[group.dtype] == tokens * row


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("int8", (2, 128, 128)),
        ("bfloat16", (2, 128, 128)),
        ("uint8", (2, 128, 64)),
        ("uint8", (4, 128, 128)),
        ("uint8", (2, 0, 128)),
        ("uint8", (2, 128)),
        ("uint8", (2,)),
        ("uint8", ()),
        ("uint8", (1, 2, 128, 128)),
    ],
)
def test_a_block_of_another_dtype_or_shape_is_refused_with_what_was_wanted(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(MismatchError, match=r"wanted uint8 \[2, tokens, 128\], as kv1-"):
        check_block(PROFILE, dtype, shape)


def test_a_layer_that_the_model_does_not_have_is_an_error() -> None:
    with pytest.raises(ProfileError, match=r"no layer 'model.layers.7.attn'"):
        check_block(PROFILE, "uint8", (2, 128, 128), "model.layers.7.attn")
    with pytest.raises(ProfileError, match="no layers"):
        replace(PROFILE, groups=()).block_shape(16)


@pytest.mark.parametrize(
    ("release", "on_gpu", "on_cpu"),
    [
        ("0.19.1", Layout.SPLIT, Layout.SPLIT),
        ("0.22.1", Layout.SPLIT, Layout.SPLIT),
        ("0.25.1", Layout.BLOCK_SPLIT, Layout.PACKED),
        ("0.28.0", Layout.PACKED, Layout.PACKED),
        ("0.32.0+cpu", Layout.PACKED, Layout.PACKED),
        ("0.33.0", Layout.PACKED, Layout.PACKED),
    ],
)
def test_the_layout_of_every_known_release_is_known(release: str, on_gpu: Layout, on_cpu: Layout) -> None:
    assert (layout_of(release, on_cpu=False), layout_of(release, on_cpu=True)) == (on_gpu, on_cpu)


@pytest.mark.parametrize("release", ["0.18.0", "0.34.0", "1.0", "0.32.1.dev7+gabc", "unknown"])
def test_a_release_that_nobody_looked_at_has_no_layout(release: str) -> None:
    with pytest.raises(ProfileError, match="unknown KV layout"):
        layout_of(release, on_cpu=False)


def test_a_short_model_name_stays_readable_in_keys() -> None:
    assert key_name("Qwen/Qwen3-30B-A3B", "kv1-0123456789ab") == "Qwen/Qwen3-30B-A3B-kv1-0123456789ab"


def test_a_long_model_name_keeps_its_last_part() -> None:
    path = f"/mnt/models/{'folder/' * 9}Qwen3-30B-A3B-FP8"
    assert re.fullmatch(r"[0-9a-f]{12}-Qwen3-30B-A3B-FP8-kv1-0123456789ab", key_name(path, "kv1-0123456789ab"))


@given(st.text(max_size=300))
def test_key_names_are_short_and_free_of_the_keys_own_separators(model: str) -> None:
    name = key_name(model, PROFILE.fingerprint)
    assert len(name) <= LONGEST_MODEL + 1 + len(PROFILE.fingerprint)
    assert not set("@%\\") & set(name)
    assert name.endswith(PROFILE.fingerprint)


@given(st.lists(st.text(max_size=200), min_size=2, max_size=2, unique=True))
def test_two_models_have_two_key_names(models: list[str]) -> None:
    one, other = (key_name(model, PROFILE.fingerprint) for model in models)
    assert one != other
