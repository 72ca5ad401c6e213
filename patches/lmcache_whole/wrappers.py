"""Where LMCache goes on with less than it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from patches.framework import process
from patches.framework.errors import EnvironmentRefusedError
from patches.framework.records import Seam

__all__ = ["ensure_native", "handle_post_init_failure", "init"]

NATIVE = "lmcache.cuda_ops"


def init(seam: Seam) -> Callable[..., None]:
    """An in-process LMCache whose parts could not be made."""
    original = seam.original

    @wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        seam.count()
        original(self, *args, **kwargs)
        if self._init_failed:
            _refuse(self._init_failed_reason)

    return start


def handle_post_init_failure(seam: Seam) -> Callable[..., None]:
    """An in-process LMCache that failed once the KV caches were registered."""
    original = seam.original

    @wraps(original)
    def failed(self: Any, error: Exception) -> None:
        seam.count()
        original(self, error)
        _refuse(self._init_failed_reason)

    return failed


def _refuse(reason: str) -> None:
    last = reason.strip().splitlines()[-1] if reason.strip() else "no reason given"
    process.refuse(
        EnvironmentRefusedError(
            f"LMCache could not start ({last}) and would cache nothing",
            "an LMCache that works",
            "Mend what the log says above, use LMCacheMPConnector with an `lmcache server`, or serve without LMCache.",
        )
    )


def ensure_native(seam: Seam) -> Callable[..., None]:
    """The operations on GPU memory: LMCache has slow ones for all of them, and uses them with a warning."""
    original = seam.original

    @wraps(original)
    def bind(self: Any) -> None:
        seam.count()
        try:
            import_module(NATIVE)
        except ImportError as error:
            process.refuse(
                EnvironmentRefusedError(
                    f"LMCache's operations for this GPU do not load ({error})",
                    f"{NATIVE}, built for the installed torch and CUDA",
                    "Install an LMCache that was built for them, or build it from source with --no-build-isolation.",
                )
            )
        original(self)

    return bind
