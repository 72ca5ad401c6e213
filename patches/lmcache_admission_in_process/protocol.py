"""Numbers for the dtypes that LMCache's remote headers do not know."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework.records import Seam

__all__ = ["CODES", "serialize"]

CODES = {
    "int8": 32,
    "int16": 33,
    "int32": 34,
    "int64": 35,
    "bool": 36,
    "float8_e4m3fnuz": 37,
    "float8_e5m2fnuz": 38,
}
"""Far from LMCache's own, which count up from 0: who does not know them fails on them and misreads nothing."""


def serialize(seam: Seam) -> Callable[..., bytes]:
    """Add the numbers to LMCache's two tables, which all its headers and messages use. The function stays as it is."""
    import torch

    module: dict[str, Any] = seam.original.__globals__
    for name, code in CODES.items():
        module["DTYPE_TO_INT"].setdefault(getattr(torch, name), code)
        module["INT_TO_DTYPE"].setdefault(code, getattr(torch, name))

    @wraps(seam.original)
    def serialized(self: Any) -> bytes:
        seam.count()
        return seam.original(self)  # type: ignore[no-any-return]

    return serialized
