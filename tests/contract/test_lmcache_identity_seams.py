"""The seams on vLLM's and LMCache's own objects: who is refused, what keys hold, what bypasses the cache, the cost.

All scenarios of :mod:`support.kv_identity_seams` run once, in one interpreter with the patches on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPLINT_", "VLLM_", "LMCACHE_"))}
    ended = subprocess.run(
        [sys.executable, "-m", "support.kv_identity_seams", str(tmp_path_factory.mktemp("seams"))],
        env={
            **kept, "SPLINT_PATCHES": "kv_profile,lmcache_identity", "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")])),
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        },
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_worker_that_sees_what_the_engine_core_saw_starts(answers: Any) -> None:
    assert answers["a_worker_that_sees_what_the_engine_core_saw"] == "started"


def test_a_worker_without_an_external_cache_is_not_asked(answers: Any) -> None:
    assert answers["a_worker_without_an_external_cache"] == "started"


@pytest.mark.parametrize(
    ("scenario", "found"),
    [
        ("a_worker_on_a_node_with_other_weights", "than its engine core: weights index:"),
        ("a_worker_whose_configuration_was_changed_on_the_way", "cache_dtype fp8_e4m3, there bfloat16"),
        ("a_worker_with_another_transfer_mode_in_its_environment", "transfer lmcache_driven, there none"),
        ("a_worker_whose_engine_core_has_no_patches", "no KV profile reached this worker"),
        ("a_connector_without_a_profile", "no KV profile reached the scheduler's connector"),
        ("keys_without_a_profile", "no KV profile reached the keys"),
        ("vllms_bundled_connector_in_place_of_lmcaches", "vLLM's bundled one would take its place"),
    ],
)
def test_what_can_not_be_told_or_differs_is_refused(answers: Any, scenario: str, found: str) -> None:
    assert found in answers[scenario]


def test_every_kv_format_that_vllm_knows_has_keys_of_its_own(answers: Any) -> None:
    keys = answers["keys_of_every_kv_format"]
    same = {"bfloat16": "auto", "fp8": "fp8_e4m3"}
    assert {name: keys[name] for name in same} == {name: keys[other] for name, other in same.items()}
    assert len(set(keys.values())) == len(keys) - len(same)
    assert {"fp8_e5m2", "nvfp4", "int4_per_token_head", "turboquant_k8v4"} <= set(keys)


def test_the_longest_key_is_a_file_name_that_file_systems_take(answers: Any) -> None:
    assert 200 < answers["the_longest_key_there_can_be"] <= 255


def test_one_adapter_in_engines_that_use_it_otherwise_has_other_keys(answers: Any) -> None:
    """What is left out of an adapter, or rounded, makes other KV of the same prompt."""
    keys = answers["one_adapter_in_engines_that_use_it_otherwise"]
    whole = ("whole", "whole, with more room", "whole, its dtype spelled out", "without the LoRA settings")
    assert len({keys[name] for name in whole}) == 1
    assert keys["two modules"] == keys["the same two"]
    apart = ("whole", "one module", "two modules", "another dtype", "shared")
    assert len({keys[name] for name in apart}) == len(apart)


def test_engines_that_process_media_otherwise_have_other_fingerprints(answers: Any) -> None:
    """vLLM names an image by its content and by the request's settings; the engine's are not in the name."""
    found = answers["media_in_engines_that_process_them_otherwise"]
    assert found["the defaults"] == found["a copy"] == found["more room"]
    apart = found.keys() - {"a copy", "more room"}
    assert len({found[name] for name in apart}) == len(apart)


def test_weights_that_are_exchanged_in_a_running_engine_are_refused(answers: Any) -> None:
    """LMCache's keys name the weights that the engine started with. The same ones may be read anew."""
    found = answers["weights_exchanged_in_a_running_engine"]
    without = {"a trainer, no cache", "another folder, no cache", "zeros, no cache"}
    without |= {"the same files, on the CPU, no cache", "a sleep of level 2, no cache"}
    reached = {"the same files", "a sleep of level 1"} | without
    assert {way for way, (said, _) in found.items() if said == "started"} == reached
    assert {way for way, (_, got_there) in found.items() if got_there} == reached
    for way in set(found) - reached:
        assert "KV of the old weights would be found, and that of the new ones stored" in found[way][0]
    assert "a reload of index:" in found["files changed since the start"][0]


def test_engines_of_both_transfer_modes_have_keys_of_their_own(answers: Any) -> None:
    keys = answers["keys_of_transfer_modes"]
    assert keys["nothing"] == keys["auto"] == keys["its own"]
    assert keys["the other"] == keys["environment"] == keys["one of several"] != keys["nothing"]


def test_a_cpu_worker_learns_its_own_transfer_mode_without_numba() -> None:
    """vLLM's CPU worker dies of looking through llvmlite, which numba brings and LMCache's own answer with it."""
    code = """
    import sys
    from patches.lmcache_identity.deriving import _own_mode
    own, brought = _own_mode(), "llvmlite" in sys.modules
    from lmcache.v1.platform import get_device_spec
    print(own, brought, get_device_spec("cpu").default_mp_transfer_mode().value, "llvmlite" in sys.modules)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.stdout.split()[-4:] == ["engine_driven", "False", "engine_driven", "True"], ended.stderr


def test_engines_with_other_speculative_models_have_keys_of_their_own(answers: Any) -> None:
    keys = answers["keys_of_speculative_models"]
    assert keys["one"] == keys["copy"]
    assert len({keys[name] for name in ("none", "one", "other")}) == 3


def test_what_lies_in_a_block_as_its_size_and_the_processor_have_it_has_keys_of_its_own(answers: Any) -> None:
    keys = answers["keys_of_blocks_that_are_no_rows"]
    for one, other in (("128", "256"), ("tiles False", "tiles True"), ("nvfp4 128", "nvfp4 256")):
        assert keys[one] != keys[other]
    assert keys["128"] in (keys["tiles False"], keys["tiles True"])


def test_between_block_sizes_the_cpu_s_keys_and_values_would_be_exchanged(answers: Any) -> None:
    assert answers["bytes_between_block_sizes_on_the_cpu"] == {"128": True, "64": False}


def test_the_report_shows_profile_and_fingerprint_of_the_engine(answers: Any) -> None:
    told = answers["a_connector_with_a_profile_publishes_it"]
    assert told["engine"].endswith(told["note"]["fingerprint"])
    assert told["note"]["digest"].startswith(told["note"]["fingerprint"].removeprefix("kv1-"))
    assert told["note"]["summary"].startswith("fp8_e5m2 · 2 x full_attention 2 x 64 · 512 B a token")


def test_tensors_of_every_layout_that_are_what_the_profile_says_are_registered(answers: Any) -> None:
    assert answers["tensors_that_are_what_the_profile_says"] == ["registered"] * 6


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("dtype", "a KV block of int8 [2, 128, 128]; wanted uint8 [2, tokens, 128]"),
        ("width", "a KV block of bfloat16 [2, 128, 128]"),
        ("heads", "a KV block of uint8 [1, 128, 128]"),
        ("head size", "a KV block of uint8 [2, 128, 64]"),
        ("unknown layer", "a KV cache of draft.layers.0.attn"),
    ],
)
def test_tensors_that_differ_from_the_profile_are_refused(answers: Any, change: str, found: str) -> None:
    assert found in answers["tensors_that_differ_from_the_profile"][change]


def test_a_layer_that_shares_anothers_cache_is_registered(answers: Any) -> None:
    assert answers["tensors_that_differ_from_the_profile"]["shared layer"] == "registered"


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("told", "registered"),
        ("unresolved", "KV cache layout has not been resolved yet"),
        ("neither", "no KV cache layout that LMCache could ask vLLM for"),
    ],
)
def test_a_layout_that_vllm_does_not_tell_is_never_guessed(answers: Any, asked: str, found: str) -> None:
    """LMCache#4870: it would log an error and take keys, values and heads to lie as they usually do."""
    assert found in answers["layouts_that_vllm_tells_and_does_not_tell"][asked]


def test_prompt_embeddings_are_neither_looked_up_nor_stored(answers: Any) -> None:
    assert answers["prompt_embeddings_are_neither_looked_up_nor_stored"] == [[0, False], None] * 3


def test_adapters_are_told_by_content_not_by_name(answers: Any) -> None:
    """LMCache#2961: another adapter's KV was taken for the base model's."""
    keys = answers["adapters_by_content"]
    assert keys["renamed copy"] == keys["first"]
    apart = ("bare", "first", "same name, other content", "with a salt", "salt alone")
    assert len({keys[name] for name in apart}) == len(apart)


def test_an_adapter_that_was_overwritten_after_it_was_loaded_is_not_taken_for_the_next(answers: Any) -> None:
    keys = answers["adapters_under_one_path"]
    assert keys["first"] is None
    assert None not in (keys["alone"], keys["second"])
    assert keys["alone"] != keys["second"]


def test_without_lmcache_no_adapter_is_read_when_it_is_loaded(answers: Any) -> None:
    assert answers["adapters_under_one_path"]["loaded without LMCache"] is not None


@pytest.mark.parametrize("which", ["reloaded in place", "of the hub, not in its cache"])
def test_an_adapter_that_can_not_be_told_bypasses_the_cache(answers: Any, which: str) -> None:
    assert answers["adapters_by_content"][which] is None


def test_keys_of_the_in_process_path_hold_the_fingerprint(answers: Any) -> None:
    keys = answers["keys_of_the_in_process_path"]
    assert keys["again"] == keys["fp8_e4m3"]
    assert not set(keys["fp8_e4m3"]) & set(keys["fp8_e5m2"])
    assert keys["parsed"] == keys["fp8_e5m2"]
    assert all("-kv1-" in key and len(key) <= 150 for key in keys["fp8_e5m2"])


def test_lmcaches_own_servers_make_the_keys_that_they_did(answers: Any) -> None:
    assert not any("-kv1-" in key for key in answers["keys_of_the_in_process_path"]["without an engine"])


def test_adapter_and_salt_are_tags_of_the_in_process_path(answers: Any) -> None:
    asked = answers["requests_of_the_in_process_path"]
    tag = "lmcache.tag.splint"
    assert asked["plain"][1] is None
    assert len({json.dumps(asked[name][1]) for name in ("plain", "salt", "adapter")}) == 3
    for name in ("salt", "adapter", "client and adapter"):
        assert asked[name][1] == asked[name][2], "stored under other keys than looked up"
        assert asked[name][1][tag]
    assert asked["client and adapter"][1][tag] == asked["adapter"][1][tag]


def test_a_client_keeps_its_own_tags_but_not_ours(answers: Any) -> None:
    found = answers["requests_of_the_in_process_path"]["client"][1]
    assert "lmcache.tag.splint" not in found
    assert found["lmcache.tag.team"] == "red"
    assert not any(set("@%/") & set(f"{name}{value}") for name, value in found.items())


@pytest.mark.parametrize("which", ["embeddings", "reloaded in place", "pooling"])
def test_what_can_not_be_told_bypasses_the_in_process_cache(answers: Any, which: str) -> None:
    assert answers["requests_of_the_in_process_path"][which] == [0, "not looked up", "not stored"]


@pytest.mark.parametrize("path", ["multiprocess", "in-process"])
def test_keys_with_the_fingerprint_cost_what_keys_without_it_cost(answers: Any, path: str) -> None:
    """Medians of 300 pairs, in turn; the bound leaves room for a loaded machine, the figure is printed."""
    spent = answers["time_of_key_making"][path]
    more = spent["patched"] - spent["stock"]
    print(f"{path}: keys of 8,192 tokens {spent['stock'] * 1e6:.1f} µs, patched {spent['patched'] * 1e6:.1f} µs;"
          f" {more / 8192 * 1e9:+.3f} ns a token")  # fmt: skip
    assert more / 8192 < 1e-9
