"""How the text of a setting is read. Standard library only: it is imported at interpreter start."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["UNPROTECTED", "kv_dtype", "names", "seconds", "seconds_or_off", "share", "shares", "unprotected"]

UNPROTECTED = (
    "all", "server", "blend", "plugin",
    "aerospike", "bigtable", "dax", "fault_inject", "hf3fs", "hfbucket", "mock", "mooncake_store", "native_plugin",
    "nixl_native", "nixl_store", "nixl_store_dynamic", "p2p", "raw_block", "s3", "sagemaker-hyperpod", "valkey",
    "audit", "azure", "blackhole", "eic", "external", "infinistore", "mooncakestore", "redis-cluster", "redis-sentinel",
    "gds", "maru", "nixl_storage", "pd",
    "cachegen",
)  # fmt: skip
"""What may be used without checksums, by LMCache's names: general ones, second levels of its server, schemes of remote
tiers, other backends of the in-process connector, its serde. ``plugin`` is whatever the operator brings."""

LONGEST_S = 30 * 24 * 3600
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SHARE = re.compile(r"(?P<rank>\d+)\s*=\s*(?P<number>\d+(\.\d+)?)\s*(?P<unit>KiB|MiB|GiB)?", re.ASCII)


def seconds(text: str) -> float:
    """A positive number of seconds. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= LONGEST_S:
        raise ValueError(f"a positive number of seconds, at most {LONGEST_S:,}")
    return value


def seconds_or_off(text: str) -> float:
    """A positive number of seconds; 0 for ``0`` and ``off``. Raises ValueError."""
    return 0.0 if text in ("0", "off") else seconds(text)


def names(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def unprotected(text: str) -> tuple[str, ...]:
    """Names of :data:`UNPROTECTED` between commas. Raises ValueError."""
    given = names(text)
    if not set(given) <= set(UNPROTECTED):
        raise ValueError(f"one or several of {', '.join(UNPROTECTED)}")
    return given


def kv_dtype(text: str) -> str:
    """The name of a KV dtype; vLLM judges which it has. Raises ValueError."""
    if not re.fullmatch(r"[a-z0-9_]*", text):
        raise ValueError("model, auto, or a name that --kv-cache-dtype takes")
    return text


def share(text: str) -> float:
    """A number from 0 to 1. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError("a share from 0 to 1")
    return value


def shares(text: str) -> dict[int, dict[str, Any]]:
    """Rank to its share, in the names of vLLM's cache configuration: a fraction of a device's memory, or bytes.

    Raises:
        ValueError: not of the form ``1=0.5,3=12GiB``, a rank twice, or a fraction outside (0, 1].
    """
    found: dict[int, dict[str, Any]] = {}
    for entry in names(text):
        match = _SHARE.fullmatch(entry)
        if match is None or int(match["rank"]) in found:
            raise ValueError("ranks with a fraction of device memory or a size, each once, as in 1=0.5,3=12GiB")
        found[int(match["rank"])] = _share(float(match["number"]), match["unit"])
    return found


def _share(number: float, unit: str | None) -> dict[str, Any]:
    size = int(number * UNITS[unit]) if unit else 0
    if size:
        return {"kv_cache_memory_bytes": size}
    if unit or not 0 < number <= 1:
        raise ValueError("a fraction above 0 and up to 1, or a size above 0 with KiB, MiB or GiB")
    return {"gpu_memory_utilization": number, "kv_cache_memory_bytes": None}
