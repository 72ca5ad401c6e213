"""One field of one kind of spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from patches.framework.records import Seam

__all__ = ["get_kv_cache_spec"]

LAYOUT = "fp8_ds_mla"


def get_kv_cache_spec(seam: Seam) -> Callable[[Any, Any], Any]:
    """Set ``kv_quant_mode`` in the spec of a layer whose layout is fp8_ds_mla; every other spec is passed on.

    The page stays 656 bytes a token: a spec takes it from its ``cache_dtype_str``.
    """
    original = seam.original

    @wraps(original)
    def spec_of(self: Any, vllm_config: Any) -> Any:
        seam.count()
        spec = original(self, vllm_config)
        return _quantised(spec) if spec.cache_dtype_str == LAYOUT else spec

    return spec_of


def _quantised(spec: Any) -> Any:
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    return replace(spec, kv_quant_mode=get_kv_quant_mode(LAYOUT))
