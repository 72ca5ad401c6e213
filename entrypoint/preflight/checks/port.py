"""The port is free."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, DoesNotApplyError, Evidence

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK", "LAST_PORT"]

DEFAULT_PORT = 8000
LAST_PORT = 65535


def applies(subject: Subject) -> str | None:
    """A server without TCP needs no port."""
    return next((f"{flag} is given" for flag in ("--headless", "--uds") if subject.arguments.has(flag)), None)


def run(subject: Subject) -> Evidence:
    """Find out now what vLLM would find out after it has loaded the model, or never: it sets ``SO_REUSEPORT``."""
    host = subject.arguments.value("--host") or ""
    text = subject.arguments.value("--port") or str(DEFAULT_PORT)
    if not text.isdecimal() or int(text) > LAST_PORT:
        raise DoesNotApplyError(f"--port {text} is no port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((host, int(text)))
        except OSError as error:
            raise CheckFailedError(
                f"port {text} of {host or 'all addresses'}: {error.strerror or error}",
                "an address and port that this server may listen on",
                "Stop what listens there, or choose another one with --host and --port.",
            ) from error
    return {"host": host, "port": int(text)}


CHECK = Check("port", "The server may listen on its address and port.", REFUSE, 10.0, applies, run)
