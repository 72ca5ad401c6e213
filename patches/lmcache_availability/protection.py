"""Whether the server at the other end is one of ours: asked at start and with every heartbeat, never for a request.

A server without vllm-splint keeps what it stores without seals, and gives damaged objects out as KV. One in report mode
only says so of a tier without seals, and of a patch that does not fit.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Any

from patches.framework import process, roster, settings
from patches.framework.errors import EnvironmentRefusedError
from patches.framework.records import Role
from patches.lmcache_admission.unprotected import SETTING, is_accepted
from patches.lmcache_availability.limits import ping_limit_s, start_limit_s
from patches.lmcache_availability.link import Link
from patches.lmcache_roster import attested

__all__ = ["ask_again", "note", "require", "still_protected"]

logger = logging.getLogger(__name__)

_NAME = "server"
_lock = threading.Lock()


def require(client: Any, link: Link) -> None:
    """At start: ask the server who it is, and refuse one that does not protect what is stored in it.

    Raises:
        EnvironmentRefusedError: in enforce mode, unless the operator accepts such a server.
    """
    current = process.current()
    if current is None:
        return
    try:
        link.server = _ask(client, start_limit_s())
        link.fault = _fault(link)
    except TimeoutError:
        link.fault = "no answer for who asks what it is"
    fault = link.fault
    if fault is not None and not is_accepted(_NAME):
        process.refuse(
            EnvironmentRefusedError(
                f"the LMCache server at {link.url} has {fault}",
                "a server that carries this project's patches: what it keeps has checksums then",
                "Start `lmcache server` from an environment or image with vllm-splint (SPLINT_MODE=enforce or"
                f" unset, SPLINT_PATCHES as here), or accept that nothing holds back damaged bytes: {SETTING}={_NAME}",
            )
        )
    elif fault is not None:
        logger.warning("LMCache server %s has %s; accepted by %s", link.url, fault, SETTING)
    note(link, answering=True)


def still_protected(client: Any, link: Link) -> bool:
    """After an answered ping: whether the server may be used, as another one may have taken the place of the first.

    One that answers pings and not this question is taken as it was known; a lost one is not taken back so.
    """
    current = process.current()
    if current is None:
        return True
    try:
        link.server = _ask(client, ping_limit_s())
    except TimeoutError:
        return not link.lost
    fault = _fault(link)
    used = fault is None or is_accepted(_NAME) or not current.enforcing
    if fault is not None and fault != link.fault:
        without = f"This engine goes on without it; {SETTING}={_NAME} in the engine's environment accepts it."
        logger.error(
            "LMCache server %s has %s now. %s", link.url, fault, "It is used all the same." if used else without
        )
    link.fault = fault
    return used


def ask_again(client: Any, link: Link) -> None:
    """Know the server as it is now. One that does not answer is known as it was.

    It makes its answer anew once a second, so an older one may be on its way: it is asked after that.
    """
    time.sleep(attested.SAID_ANEW_AFTER_S)
    with suppress(TimeoutError):
        link.server = _ask(client, ping_limit_s())


def _ask(client: Any, limit_s: float) -> dict[str, Any] | None:
    """The server's attestation. Raises TimeoutError: no answer within ``limit_s`` seconds."""
    return attested.in_answer(client.get_experimental().result(timeout=limit_s))


def _fault(link: Link) -> str | None:
    return attested.fault(link.server, settings.get("SPLINT_PATCHES"))


def note(link: Link, *, answering: bool) -> None:
    """Show the server in this process's attestation. Of an engine's processes the engine core alone does that."""
    current = process.current()
    if current is None or current.identity.get("role") != Role.ENGINE_CORE.value:
        return
    said = {"seen": time.time(), "answering": answering, "accepted": is_accepted(_NAME), "fault": link.fault}
    with _lock:
        known = current.facts.get(roster.REMOTE, {})
        current.note(**{roster.REMOTE: {**known, link.url: {**said, "server": link.server}}})
