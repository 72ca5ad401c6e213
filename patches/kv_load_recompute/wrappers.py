"""The default of one field, changed where vLLM makes the class, so that every way to set it still wins."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework.errors import TargetMissingError
from patches.framework.records import Seam

__all__ = ["config"]

CLASS = "KVTransferConfig"
FIELD = "kv_load_failure_policy"


def config(seam: Seam) -> Callable[..., Any]:
    """Set the default before the decorator turns the class into a dataclass.

    The finished class can't tell a value that was given from one that was not: JSON, keyword and dictionary all end
    in the same validated field.
    """
    decorate = seam.original

    @wraps(decorate)
    def with_default(cls: Any = None, **kwargs: Any) -> Any:
        seam.count()
        if cls is not None and cls.__name__ == CLASS:
            _recompute_by_default(cls)
        return decorate(cls, **kwargs)

    return with_default


def _recompute_by_default(cls: Any) -> None:
    """Raises TargetMissingError: the field is gone or has another default than it had when it was reviewed."""
    found = vars(cls).get(FIELD)
    if found not in ("fail", "recompute"):
        raise TargetMissingError(
            f"{CLASS}.{FIELD} has the default {found!r}",
            "fail or recompute",
            "Install a release that vllm-splint covers, or leave kv_load_recompute out with SPLINT_PATCHES.",
        )
    setattr(cls, FIELD, "recompute")
