"""The seal: what stands behind an object's bytes in a tier, and says whose bytes they are and that they are whole.

A reader makes the seal that it would have written for the bytes that came, and compares. Nothing in a found seal is
trusted or acted upon, so a damaged one can do no harm.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from patches.framework.errors import EnvironmentRefusedError

__all__ = [
    "NO_SERDE",
    "SEAL_BYTES",
    "VERSION",
    "Meaning",
    "array",
    "check_speed",
    "difference",
    "key_digest",
    "layout_digest",
    "make",
    "serde_digest",
]

VERSION = 2
"""Changes with the meaning of any field: seals of another version are misses."""

_MAGIC = b"splintKV"
_FIELDS = struct.Struct("<8sHHIQ16s8s8s16s")
_SUM = struct.Struct("<II")
SEAL_BYTES = _FIELDS.size + _SUM.size
"""80: magic, version, own length, groups, bytes before it, digests of key, layout and serde, fingerprint, two sums."""

_DIGEST_BYTES = 16
_SHORT_BYTES = 8
"""Of digests that few values in one store have."""
_FINGERPRINT_BYTES = 16
NO_SERDE = bytes(_SHORT_BYTES)
"""Stands for bytes that no serde has made."""
_REASONS = (
    ("wrong_key", 5), ("wrong_fingerprint", 8), ("wrong_serde", 7), ("wrong_layout", 6), ("wrong_groups", 3),
    ("wrong_size", 4),
)  # fmt: skip


@cache
def _crc32c() -> Callable[[Any, int], int]:
    """CRC-32C of more bytes, by the compiled code in awscrt, which gives the interpreter's lock away meanwhile.

    It folds 64 bytes a step where the processor can (AVX-512 with VPCLMULQDQ).

    Raises:
        EnvironmentRefusedError: it is not there.
    """
    try:
        from awscrt.checksums import crc32c
    except ImportError as error:
        raise EnvironmentRefusedError(
            f"no awscrt, which makes the checksums ({error})",
            "the awscrt that LMCache itself requires",
            "Install LMCache with its dependencies, or awscrt from a wheel for this Python.",
        ) from error
    return crc32c  # type: ignore[no-any-return]


def check_speed() -> None:
    """The checksum must be compiled code. Raises EnvironmentRefusedError: it is not."""
    _crc32c()


def key_digest(parts: Sequence[str]) -> bytes:
    """16 bytes that stand for a key. ``parts`` are its fields as text, always in the same order."""
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


@lru_cache(maxsize=1024)
def layout_digest(groups: tuple[tuple[str, tuple[int, ...]], ...], form: str) -> bytes:
    """8 bytes that stand for the dtype (torch's name) and shape of each group, and LMCache's name of the format."""
    return hashlib.blake2b(repr((groups, form)).encode(), digest_size=_SHORT_BYTES).digest()


def serde_digest(described: str) -> bytes:
    """8 bytes that stand for a serde and its settings, which are ``described``."""
    return hashlib.blake2b(described.encode("utf-8", "surrogatepass"), digest_size=_SHORT_BYTES).digest()


@dataclass(frozen=True)
class Meaning:
    """What an object is, apart from its bytes.

    Attributes:
        key: What :func:`key_digest` gave.
        layout: What :func:`layout_digest` gave.
        groups: How many KV groups it holds.
        fingerprint: The KV fingerprint in its key, or nothing where it has none.
        serde: What :func:`serde_digest` gave for the serde that made the bytes, or :data:`NO_SERDE`.
    """

    key: bytes
    layout: bytes
    groups: int
    fingerprint: str
    serde: bytes = NO_SERDE


def make(meaning: Meaning, address: int, size: int) -> bytes:
    """The seal of ``size`` bytes at ``address``: :data:`SEAL_BYTES` bytes. The memory must not change meanwhile."""
    mark = meaning.fingerprint.encode("ascii", "replace")[:_FINGERPRINT_BYTES]
    fields = _FIELDS.pack(
        _MAGIC, VERSION, SEAL_BYTES, meaning.groups, size, meaning.key, meaning.layout, meaning.serde, mark
    )
    crc32c = _crc32c()
    return fields + _SUM.pack(crc32c(memoryview(array(size).from_address(address)), 0), crc32c(fields, 0))


def difference(made: bytes, found: bytes) -> str | None:
    """Why ``found`` is not the seal that belongs there, in one word, or None where it is.

    Args:
        made: The seal that the reader makes for the bytes it got, its own key and layout.
        found: What stands behind these bytes.
    """
    if made == found:
        return None
    if len(found) != SEAL_BYTES or found[:8] != _MAGIC:
        return "no_seal"
    wanted, there = _FIELDS.unpack(made[: _FIELDS.size]), _FIELDS.unpack(found[: _FIELDS.size])
    if _SUM.unpack(found[_FIELDS.size :])[1] != _crc32c()(found[: _FIELDS.size], 0):
        return "damaged"
    if there[1:3] != wanted[1:3]:
        return "other_version"
    return next((reason for reason, place in _REASONS if there[place] != wanted[place]), "damaged")


@lru_cache(maxsize=1024)
def array(length: int) -> Any:
    """A ctypes array type of ``length`` bytes. ctypes keeps every one it ever made, so they are shared."""
    return ctypes.c_ubyte * length
