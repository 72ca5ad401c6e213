"""Where the in-process connector is exact, as data and one function; nothing of vLLM or LMCache is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ALTERNATIVE", "CONNECTOR", "RULES", "Cache", "Rule", "named_in", "unfit"]

CONNECTOR = "LMCacheConnectorV1"
ALTERNATIVE = (
    "Use LMCacheMPConnector with an `lmcache server` (--supported-transfer-mode auto), or set"
    " SPLINT_LMCACHE_IN_PROCESS=leave_out to start without an external cache."
)


@dataclass(frozen=True)
class Cache:
    """What decides: the device, and what kinds of state the model's layers keep.

    Attributes:
        on_cpu: Whether vLLM's platform is the CPU.
        latent: Whether a token is one latent vector in each layer (MLA).
        sparse: Whether layers keep an indexer's cache beside it.
        hybrid: Whether some layers keep a recurrent state (Mamba, GDN).
        format: ``--kv-cache-dtype``.
    """

    on_cpu: bool = False
    latent: bool = False
    sparse: bool = False
    hybrid: bool = False
    format: str = "auto"


@dataclass(frozen=True)
class Rule:
    """One kind of cache that the connector can't hold."""

    why: str
    applies: Callable[[Cache], bool]


RULES = (
    Rule("there is no in-process connector for the CPU; it would start, and cache nothing", lambda cache: cache.on_cpu),
    Rule(
        "it can't serve hybrid models, whose layers keep a recurrent state beside keys and values ('failed to convert"
        " the KV cache specs to one unified type')",
        lambda cache: cache.hybrid,
    ),
    Rule("it knows one cache a layer, and sparse latent attention has two", lambda cache: cache.sparse),
    Rule("it takes the rows of fp8_ds_mla for shorter ones", lambda cache: cache.format == "fp8_ds_mla"),
    Rule(
        "it takes keys and values of vLLM's packed KV layout (0.26 and later) for one another and overwrites foreign"
        " blocks",
        lambda cache: not cache.latent,
    ),
    Rule(
        "nothing proves it exact for latent attention on vLLM 0.26 and later (emulated in part, never run)",
        lambda cache: cache.latent,
    ),
)
"""In the order in which they are told. One always applies under vLLM 0.32, where the patch begins."""


def unfit(cache: Cache) -> str | None:
    """Why the connector can't hold this cache, or None where it is exact."""
    return next((rule.why for rule in RULES if rule.applies(cache)), None)


def named_in(transfer: Mapping[str, Any] | None) -> bool:
    """Whether a ``kv_transfer_config`` names the connector, by itself or inside one of several."""
    return transfer is not None and f"'{CONNECTOR}'" in repr(transfer)
