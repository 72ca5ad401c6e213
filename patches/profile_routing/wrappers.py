"""What the dummy batch of a profile run says about its tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from patches.framework.records import Seam

__all__ = ["dummy_run", "make_dummy"]

_profiling: ContextVar[bool] = ContextVar("profiling", default=False)


def dummy_run(seam: Seam) -> Callable[..., Any]:
    """Note, for the length of the run, whether it is one that measures."""
    original = seam.original

    @wraps(original)
    def noted(self: Any, *args: Any, is_profile: bool = False, **kwargs: Any) -> Any:
        seam.count()
        outer = _profiling.set(is_profile)
        try:
            return original(self, *args, is_profile=is_profile, **kwargs)
        finally:
            _profiling.reset(outer)

    return noted


def make_dummy(seam: Seam) -> Callable[..., Any]:
    """Count the tokens of a profile run as traffic; those of an idle data-parallel rank stay padding."""
    original = seam.original

    @wraps(original)
    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        seam.count()
        batch = original(cls, *args, **kwargs)
        if _profiling.get():
            batch.is_padding.fill_(False)
        return batch

    return made
