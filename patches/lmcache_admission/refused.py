"""The last registration that an LMCache server refused, as it stands in its attestation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FACT", "said"]

FACT = "lmcache_refused_registrations"


def said(facts: Mapping[str, Any]) -> tuple[int, str]:
    """How many registrations a server has refused, and why it refused the last one (empty before the first)."""
    found = facts.get(FACT)
    count, reason = (found.get("count"), found.get("reason")) if isinstance(found, Mapping) else (None, None)
    return (count, reason) if isinstance(count, int) and isinstance(reason, str) else (0, "")
