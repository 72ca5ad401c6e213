"""A client that asks a server without a pause, whatever it answers."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import httpx

from support.servers import Server

__all__ = ["hammered"]

REQUESTS: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("GET", "/health", None),
    ("GET", "/v1/models", None),
    ("GET", "/metrics", None),
    ("POST", "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1}),
    ("POST", "/splint/control/reset_prefix_cache", {}),
)


def hammered(server: Server) -> Counter[int]:
    """Ask without a pause until the server has ended; how often each status came. A refused connection has none."""
    seen: Counter[int] = Counter()
    with httpx.Client(base_url=server.base_url, timeout=10) as client:
        while server.process is not None and server.process.poll() is None:
            for method, path, body in REQUESTS:
                with suppress(httpx.TransportError):
                    seen[client.request(method, path, json=body).status_code] += 1
    return seen
