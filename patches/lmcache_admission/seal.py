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

import google_crc32c

from patches.framework.errors import EnvironmentRefusedError

__all__ = [
    "SEAL_BYTES",
    "VERSION",
    "Meaning",
    "array",
    "check_speed",
    "difference",
    "key_digest",
    "layout_digest",
    "make",
]

VERSION = 1
"""Changes with the meaning of any field: seals of another version are misses."""

_MAGIC = b"splintKV"
_FIELDS = struct.Struct("<8sHHIQ16s16s16s")
_SUM = struct.Struct("<II")
SEAL_BYTES = _FIELDS.size + _SUM.size
"""80: magic, version, own length, groups, bytes before it, digests of key and layout, fingerprint, two sums."""

_DIGEST_BYTES = 16
_FINGERPRINT_BYTES = 16
_REASONS = (("wrong_key", 5), ("wrong_fingerprint", 7), ("wrong_layout", 6), ("wrong_groups", 3), ("wrong_size", 4))


@cache
def _extend() -> Callable[[int, int, int], int]:
    """CRC-32C of more bytes at an address, by the compiled code in google-crc32c, without the interpreter's lock.

    Raises:
        EnvironmentRefusedError: it is not there; in Python it would be a thousand times slower.
    """
    try:
        from google_crc32c import _crc32c

        function = ctypes.CDLL(_crc32c.__file__).crc32c_extend
    except (ImportError, OSError, AttributeError) as error:
        raise EnvironmentRefusedError(
            f"google-crc32c without its compiled part ({error})",
            "the compiled one, as its wheels have it",
            "Install google-crc32c from a wheel for this Python; LMCache's own dependencies bring it.",
        ) from error
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint32
    return function


def check_speed() -> None:
    """The checksum must be compiled code. Raises EnvironmentRefusedError: it is not."""
    _extend()


def key_digest(parts: Sequence[str]) -> bytes:
    """16 bytes that stand for a key. ``parts`` are its fields as text, always in the same order."""
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


@lru_cache(maxsize=1024)
def layout_digest(groups: tuple[tuple[str, tuple[int, ...]], ...], form: str) -> bytes:
    """16 bytes that stand for the dtype (torch's name) and shape of each group, and LMCache's name of the format."""
    return hashlib.blake2b(repr((groups, form)).encode(), digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True)
class Meaning:
    """What an object is, apart from its bytes.

    Attributes:
        key: What :func:`key_digest` gave.
        layout: What :func:`layout_digest` gave.
        groups: How many KV groups it holds.
        fingerprint: The KV fingerprint in its key, or nothing where it has none.
    """

    key: bytes
    layout: bytes
    groups: int
    fingerprint: str


def make(meaning: Meaning, address: int, size: int) -> bytes:
    """The seal of ``size`` bytes at ``address``: :data:`SEAL_BYTES` bytes. The memory must not change meanwhile."""
    mark = meaning.fingerprint.encode("ascii", "replace")[:_FINGERPRINT_BYTES]
    fields = _FIELDS.pack(_MAGIC, VERSION, SEAL_BYTES, meaning.groups, size, meaning.key, meaning.layout, mark)
    return fields + _SUM.pack(_extend()(0, address, size), google_crc32c.value(fields))


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
    if _SUM.unpack(found[_FIELDS.size :])[1] != google_crc32c.value(found[: _FIELDS.size]):
        return "damaged"
    if there[1:3] != wanted[1:3]:
        return "other_version"
    return next((reason for reason, place in _REASONS if there[place] != wanted[place]), "damaged")


@lru_cache(maxsize=1024)
def array(length: int) -> Any:
    """A ctypes array type of ``length`` bytes. ctypes keeps every one it ever made, so they are shared."""
    return ctypes.c_ubyte * length
