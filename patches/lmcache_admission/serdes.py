"""Serdes that compute with KV elements as if they were numbers, and KV whose elements are codes: never together.

vLLM hands its one-byte formats over as ``uint8`` codes. A serde that rounds them as numbers changes most of them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any

from patches.framework.errors import EnvironmentRefusedError
from patches.framework.libraries import installed_version
from patches.lmcache_admission.seal import NO_SERDE, serde_digest

__all__ = ["check_in_process", "digest", "take_layouts", "take_tier"]

EXACT = frozenset({"aesgcm"})
EXACT_IN_PROCESS = frozenset({"naive", "kivi"})
"""LMCache's kivi copies what it gets, in this release."""

WITHOUT_MEANING = frozenset({"max_workers"})
"""Settings of LMCache's serdes that leave the bytes as they are."""

_lock = threading.Lock()
_lossy: set[str] = set()
_one_byte: set[str] = set()


def digest(config: Any) -> bytes:
    """What stands for a serde in a seal: 8 bytes.

    An exact serde says itself whether it can read what another has made (aesgcm: by its tag); keys may have moved. Of
    any other, the settings decide what a byte means, and so do LMCache's own defaults and formats: its release.

    Args:
        config: LMCache's ``SerdeConfig``, or None where there is no serde.
    """
    if config is None:
        return NO_SERDE
    described = [config.type]
    if config.type not in EXACT:
        settings = {name: value for name, value in config.kwargs.items() if name not in WITHOUT_MEANING}
        described += [installed_version("lmcache"), settings]
    return serde_digest(json.dumps(described, sort_keys=True, default=repr))


def take_tier(config: Any) -> None:
    """Note the serde of a tier of the LMCache server.

    Raises:
        EnvironmentRefusedError: it is lossy and an engine with one-byte KV is registered.
    """
    if config.serde_config is None or config.serde_config.type in EXACT:
        return
    with _lock:
        _check({config.serde_config.type}, _one_byte)
        _lossy.add(config.serde_config.type)


def take_layouts(name: str, layouts: Iterable[Any]) -> None:
    """Note what an engine registers.

    Raises:
        EnvironmentRefusedError: it has one-byte KV and a tier's serde is lossy.
    """
    if any(dtype.itemsize == 1 for layout in layouts for dtype in layout.dtypes):
        with _lock:
            _check(_lossy, {name})
            _one_byte.add(name)


def check_in_process(serde: str, dtype: Any) -> None:
    """The same for the in-process connector's remote tier.

    Raises:
        EnvironmentRefusedError: the serde is lossy and the KV has one byte an element.
    """
    if serde not in EXACT_IN_PROCESS and dtype.itemsize == 1:
        _check({serde}, {"this engine"})


def _check(serdes: Iterable[str], names: Iterable[str]) -> None:
    if serdes and names:
        raise EnvironmentRefusedError(
            f"the lossy serde {', '.join(sorted(serdes))} for the one-byte KV cache of {', '.join(sorted(names))}",
            "KV elements that are numbers (bfloat16, float16), or no lossy serde",
            "Leave the serde out: an FP8 KV cache has half the bytes already. Or serve with --kv-cache-dtype auto.",
        )
