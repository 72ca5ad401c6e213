"""What the runner is configured with reaches the backend, which can't work with 'auto'."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from patches.framework.records import Seam

__all__ = ["get_kv_cache_shape", "reshape_kv_cache_tensors"]

_configured: ContextVar[str] = ContextVar("configured", default="auto")


def reshape_kv_cache_tensors(seam: Seam) -> Callable[..., Any]:
    """Say which dtype is configured, for as long as the runner gives its tensors their shapes."""
    original = seam.original

    @wraps(original)
    def reshape(self: Any, *args: Any, **kwargs: Any) -> Any:
        seam.count()
        token = _configured.set(self.cache_config.cache_dtype)
        try:
            return original(self, *args, **kwargs)
        finally:
            _configured.reset(token)

    return reshape


def get_kv_cache_shape(seam: Seam) -> Callable[..., tuple[int, ...]]:
    """Take 'auto' for the configured dtype: the backend only ever serves layers that are quantised with it.

    Layers that --kv-cache-dtype-skip-layers leaves out have a backend of their own.
    """
    original = seam.original

    @wraps(original)
    def shape_of(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        seam.count()
        if kwargs.get("cache_dtype_str") == "auto":
            kwargs["cache_dtype_str"] = _configured.get()
        shape: tuple[int, ...] = original(*args, **kwargs)
        return shape

    return shape_of
