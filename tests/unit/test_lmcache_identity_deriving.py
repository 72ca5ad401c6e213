"""Configurations as text that is the same in every process, and names of KV formats."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.framework.errors import ProfileError
from patches.lmcache_identity import deriving
from patches.lmcache_identity.deriving import _long_rope, _weights, canonical, derive, normalised_cache_dtype
from patches.lmcache_identity.profile import key_name


class Kind(str, Enum):
    ONE = "one"


@dataclass
class Settings:
    bits: int = 8
    names: set[str] = field(default_factory=lambda: {"b", "a"})


class Configuration:
    """As Transformers' are: an object that tells its content by ``to_dict``."""

    def __init__(self, **content: Any) -> None:
        self.content = content

    def to_dict(self) -> dict[str, Any]:
        return self.content


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_plain_values_become_json_that_tells_them_apart(value: Any) -> None:
    text = json.dumps(canonical(value), sort_keys=True)
    assert json.dumps(canonical(json.loads(text)), sort_keys=True) == text


@given(st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_the_order_of_fields_does_not_matter(content: dict[str, Any]) -> None:
    turned = dict(reversed(content.items()))
    assert json.dumps(canonical(content), sort_keys=True) == json.dumps(canonical(turned), sort_keys=True)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (1.0, "1.0"),
        (float("inf"), "inf"),
        (Fraction(1, 3), "Fraction(1, 3)"),
        ({3, 1, 2}, [1, 2, 3]),
        ((1, "a"), [1, "a"]),
        (Kind.ONE, "Kind.ONE"),
        (Settings(), {"bits": 8, "names": ["a", "b"]}),
        (Settings, f"{__name__}.Settings"),
        ({1: "a"}, {"1": "a"}),
        (Configuration(layers=2, text=Configuration(heads=4)), {"layers": 2, "text": {"heads": 4}}),
    ],
)
def test_everything_that_configurations_hold_has_a_form(value: Any, wanted: Any) -> None:
    assert canonical(value) == wanted


def test_where_a_configuration_came_from_is_not_what_it_is() -> None:
    here = Configuration(layers=2, _name_or_path="/a", transformers_version="5.1", text={"_name_or_path": "/a"})
    there = Configuration(layers=2, _name_or_path="/b", transformers_version="5.2", text={"_name_or_path": "/b"})
    assert canonical(here) == canonical(there)


def test_an_object_that_shows_nothing_of_itself_is_refused_by_its_place() -> None:
    with pytest.raises(ProfileError, match=r"configuration\.rope\[1\] holds a builtins\.object"):
        canonical({"rope": [1, object()]})


@pytest.mark.parametrize(
    ("given_", "fnuz", "name"),
    [
        ("auto", False, "bfloat16"),
        ("bfloat16", False, "bfloat16"),
        ("float16", False, "float16"),
        ("fp8", False, "fp8_e4m3"),
        ("fp8_e4m3", False, "fp8_e4m3"),
        ("fp8_e5m2", False, "fp8_e5m2"),
        ("fp8", True, "fp8_e4m3fnuz"),
        ("fp8_e4m3", True, "fp8_e4m3fnuz"),
        ("fp8_per_token_head", True, "fp8_per_token_headfnuz"),
        ("nvfp4", True, "nvfp4"),
        ("fp8_ds_mla", False, "fp8_ds_mla"),
    ],
)
def test_a_kv_format_has_one_name(given_: str, fnuz: bool, name: str) -> None:
    assert normalised_cache_dtype(given_, "bfloat16", fnuz=fnuz) == name


@pytest.mark.parametrize(
    ("rope", "length", "wanted"),
    [
        (None, 8192, None),
        ({"rope_type": "default"}, 8192, None),
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096}, 4096, False),
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096}, 4097, True),
        ({"type": "su", "original_max_position_embeddings": 4096}, 131072, True),
        ({"rope_type": "longrope"}, 131072, None),
    ],
)
def test_longrope_by_the_length_of_the_engine_makes_another_model(rope: Any, length: int, wanted: bool | None) -> None:
    """vLLM picks the long or the short factors by --max-model-len, so the same tokens have other keys."""
    text = SimpleNamespace(rope_parameters=rope)
    assert _long_rope(SimpleNamespace(hf_text_config=text, max_model_len=length)) is wanted


def test_a_path_with_what_separates_parts_of_keys_is_replaced() -> None:
    assert key_name("/models/a@b", "kv1-0") == key_name("/models/a@b", "kv1-0")
    assert "@" not in key_name("/models/a@b", "kv1-0")


def test_weights_that_a_loader_takes_from_elsewhere_are_told_apart() -> None:
    model = SimpleNamespace(model="org/m", revision="a" * 40, hf_config_path=None, hf_config=SimpleNamespace())

    def of(**extra: str) -> str:
        return _weights(model, SimpleNamespace(load_format="tensorizer", model_loader_extra_config=extra))

    assert of() == f"commit:{'a' * 40}"
    assert len({of(), of(tensorizer_uri="s3://weights/1"), of(tensorizer_uri="s3://weights/2")}) == 3


def model(commit: str, **fields: Any) -> Any:
    """What the derivation reads of vLLM's ``ModelConfig``."""
    configuration = SimpleNamespace(rope_parameters=None, to_dict=lambda: {"layers": 2} | fields)
    return SimpleNamespace(
        model="org/m", revision=commit, hf_config_path=None, hf_config=configuration, hf_text_config=configuration,
        dtype="torch.bfloat16", quantization=None, max_model_len=2048, disable_sliding_window=False,
    )  # fmt: skip


def engine(speculative: Any = None) -> Any:
    """What the derivation reads of vLLM's ``VllmConfig``."""
    parallel = SimpleNamespace(
        tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1,
        prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1,
    )  # fmt: skip
    return SimpleNamespace(
        model_config=model("a" * 40), parallel_config=parallel, cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=None, speculative_config=speculative, kv_transfer_config=None, lora_config=None,
    )  # fmt: skip


def test_engines_with_other_speculative_models_have_other_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model's layers lie in the same cache, and are stored with the others."""
    monkeypatch.setattr(deriving, "_fnuz", lambda: False)
    monkeypatch.setattr(deriving, "_on_cpu", lambda: False)
    monkeypatch.setattr(deriving, "release_of", lambda _library: "0.32.0")

    def of(method: str, draft: Any, kv_cache_dtype: str | None = None) -> str:
        speculative = SimpleNamespace(method=method, draft_model_config=draft, kv_cache_dtype=kv_cache_dtype)
        return derive(engine(speculative)).digest

    assert of("eagle", model("b" * 40)) == of("eagle", model("b" * 40))
    apart = {
        derive(engine()).digest, of("ngram", None), of("eagle", model("b" * 40)), of("mtp", model("b" * 40)),
        of("eagle", model("c" * 40)), of("eagle", model("b" * 40, layers=3)),
        of("eagle", model("b" * 40), kv_cache_dtype="fp8"),
    }  # fmt: skip
    assert len(apart) == 7
