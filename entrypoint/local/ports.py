"""Ports of this machine."""

from __future__ import annotations

import socket
from contextlib import ExitStack

__all__ = ["free_ports", "is_free"]


def free_ports(count: int) -> list[int]:
    """Different TCP ports of the loopback address that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on ``port`` of ``host`` now, as vLLM would."""
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((host, port))
        except OSError:
            return False
        return True
