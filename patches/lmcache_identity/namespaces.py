"""What separates requests of one engine: the LoRA adapter and the tenant's salt. Pure text; clients can't forge it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["TAG", "salt_for", "tagged"]

LONGEST_SALT = 72
"""In bytes. LMCache allows 128 characters, but with all else that is in a file's name those are more than its 255."""

_FORBIDDEN = frozenset("@/\\\0")
"""LMCache raises on them, in the scheduler. vLLM's HTTP API refuses them, its Python one does not."""

_ADAPTER = "lora~"
_DIGESTED = "salt~"
_DIGITS = 32
_TAG_PREFIX = "lmcache.tag."
TAG = f"{_TAG_PREFIX}splint"
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,64}")


def salt_for(salt: str, adapter: str | None = None) -> str:
    """The salt that stands in the keys of a request: one for every pair of the client's salt and the adapter.

    A client's salt stays as it is where it can, because LMCache's quotas go by it. One that looks like ours, or that
    keys can't hold, is replaced by its digest, so that no salt reaches an adapter's namespace or fails to be stored.

    Args:
        salt: The client's ``cache_salt``, or an empty text.
        adapter: The identity of the LoRA adapter, 16 hex digits, or None.

    Returns:
        At most 72 bytes, without ``@``, ``/``, backslash and NUL.
    """
    own = _digested(salt) if salt.startswith((_ADAPTER, _DIGESTED)) or not _fits(salt) else salt
    if adapter is None:
        return own
    whole = f"{_ADAPTER}{adapter}~{own}"
    return whole if _fits(whole) else f"{_ADAPTER}{adapter}~{_digested(salt)}"


def _fits(salt: str) -> bool:
    return len(salt.encode("utf-8", "surrogatepass")) <= LONGEST_SALT and not _FORBIDDEN & set(salt)


def _digested(text: str) -> str:
    return _DIGESTED + _digest(text)[:_DIGITS]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def tagged(configs: Mapping[str, Any], salt: str) -> dict[str, Any]:
    """A request's ``lmcache.*`` settings with the salt as a tag of the in-process path's keys.

    Ours comes first, always as a digest, and replaces a client's of that name. A client's tags become part of file
    names: one with anything but letters, digits, dot, dash and underscore is replaced by its digest, name and value
    alike.

    Args:
        configs: The client's own settings.
        salt: What :func:`salt_for` returned; empty for none.
    """
    ours = {TAG: _digest(salt)[:_DIGITS]} if salt else {}
    rest = {name: value for name, value in configs.items() if not name.startswith(_TAG_PREFIX)}
    theirs = {
        _TAG_PREFIX + _plain(name.removeprefix(_TAG_PREFIX)): _plain(str(value))
        for name, value in configs.items()
        if name.startswith(_TAG_PREFIX) and name != TAG
    }
    return {**rest, **ours, **theirs}


def _plain(text: str) -> str:
    return (
        text if _PLAIN.fullmatch(text) else "x" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    )
