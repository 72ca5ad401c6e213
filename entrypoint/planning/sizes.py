"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from patches.framework.errors import PlanError

__all__ = ["GIB", "MOST", "gib", "parse"]

GIB = 1 << 30
MOST = 1 << 50
"""A pebibyte, in bytes: no device has as much, and every float can hold it."""
_UNITS = {
    "": 1,
    **{name: 1000**power for power, name in enumerate(("b", "kb", "mb", "gb", "tb"))},
    **{name: 1024**power for power, name in enumerate(("kib", "mib", "gib", "tib"), start=1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse(text: str, what: str) -> int:
    """Bytes in ``80GiB``, ``141GB``, ``1.5 GiB`` or ``68719476736``.

    Args:
        text: The amount.
        what: What it is of, for the message.

    Raises:
        PlanError: it is no amount, or one of a few bytes, as a number without its unit is, or above :data:`MOST`.
    """
    match = _SIZE.fullmatch(text)
    unit = match and _UNITS.get(match[2].lower())
    if not match or unit is None:
        raise PlanError(f"{what} {text!r}", "an amount such as 80GiB, 141GB or a number of bytes", "Correct it.")
    size = _bytes(float(match[1]) * unit, what)
    if 0 < size < _UNITS["kib"]:
        raise PlanError(f"{what} of {size} bytes", "an amount with its unit", f"Write {match[1]}GiB if you mean that.")
    return size


def _bytes(size: float, what: str) -> int:
    if size > MOST:
        raise PlanError(
            f"{what} of more than {MOST} bytes", "what a device may have", "Correct the number or its unit."
        )
    return int(size)


def gib(size: float) -> str:
    """``size`` bytes in GiB, to two digits."""
    return f"{size / GIB:,.2f}"
