"""Who may read the report: with an API key, those who have it. The probes are everybody's."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from typing import Any

__all__ = ["Access", "api_keys"]

_SCHEME = "bearer"


def api_keys(args: Any) -> list[str]:
    """The keys that vLLM accepts: ``--api-key``, else ``VLLM_API_KEY``; empty where it asks for none.

    Args:
        args: The API server's parsed arguments.
    """
    return [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]


class Access:
    """Compares a request's bearer token with the keys, in a time that tells nothing of them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def allows(self, authorization: str | None) -> bool:
        """Whether the value of a request's ``Authorization`` header opens the report."""
        if not self._digests:
            return True
        scheme, _, token = (authorization or "").partition(" ")
        offered = _digest(token.strip())
        matches = [hmac.compare_digest(offered, digest) for digest in self._digests]
        return scheme.lower() == _SCHEME and any(matches)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
