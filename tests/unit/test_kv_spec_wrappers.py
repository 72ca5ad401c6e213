"""The wrappers of the KV-cache specs touch what they are for, and hand everything else through."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework.records import Seam
from patches.mla_kv_spec.wrappers import get_kv_cache_spec
from patches.turboquant_kv_spec.wrappers import get_kv_cache_shape, reshape_kv_cache_tensors


def seam(original: Callable[..., Any]) -> Seam:
    return Seam("module:name", original, lambda: None)


@pytest.mark.parametrize("dtype", [None, "auto", "fp8", "fp8_e4m3"])
def test_the_spec_of_any_other_mla_layout_is_the_identical_thing(dtype: str | None) -> None:
    spec = SimpleNamespace(cache_dtype_str=dtype)
    assert get_kv_cache_spec(seam(lambda *_: spec))(None, None) is spec


def runner(dtype: str, reshape: Callable[..., Any]) -> Any:
    layers = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=dtype))
    return reshape_kv_cache_tensors(seam(reshape))(layers)


def shape_of(**given: Any) -> Any:
    return get_kv_cache_shape(seam(lambda **kwargs: kwargs))(**given)


def test_auto_is_taken_for_the_configured_dtype_while_a_runner_reshapes() -> None:
    found = runner("turboquant_k8v4", lambda _: shape_of(cache_dtype_str="auto"))
    assert found == {"cache_dtype_str": "turboquant_k8v4"}


@pytest.mark.parametrize("given", [{}, {"cache_dtype_str": "turboquant_3bit_nc"}])
def test_a_caller_that_names_a_dtype_or_none_is_left_alone(given: dict[str, str]) -> None:
    assert runner("turboquant_k8v4", lambda _: shape_of(**given)) == given


def test_outside_a_runner_auto_stays_auto_even_after_one_failed() -> None:
    def fails(_: Any) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        runner("turboquant_k8v4", fails)
    assert shape_of(cache_dtype_str="auto") == {"cache_dtype_str": "auto"}
