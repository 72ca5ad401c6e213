"""Where the LMCache server starts, with its role noted on the way in, and where it tells an engine who it is."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework import process, tallies
from patches.framework.errors import EnvironmentRefusedError, RunDirectoryError
from patches.framework.records import Role, Seam
from patches.lmcache_admission.unprotected import SETTING, is_accepted
from patches.lmcache_roster import attested
from patches.supervision import living

__all__ = ["get_experimental", "run_cache_server"]


def run_cache_server(seam: Seam) -> Callable[..., Any]:
    """Note the role, prove the patches, then serve."""

    @wraps(seam.original)
    def start(*args: Any, **kwargs: Any) -> Any:
        seam.count()
        current = process.start()
        for left in living.ended_cache_server_folders():
            shutil.rmtree(left, ignore_errors=True)
        try:
            current.take_role(Role.LMCACHE_SERVER)
        except RunDirectoryError as error:
            current.refuse(EnvironmentRefusedError(error.found, error.wanted, error.remedy))
        current.verify_cache_server()
        _check_engine(kwargs.get("mp_config", args[0] if args else None))
        started = seam.original(*args, **kwargs)
        current.alone = False
        return started

    return start


def _check_engine(mp_config: Any) -> None:
    """Refuse the engine that joins stored chunks of other prompts: its hits are not what a cold run computes."""
    if getattr(mp_config, "engine_type", None) == "blend" and not is_accepted("blend"):
        process.refuse(
            EnvironmentRefusedError(
                "lmcache server --engine-type blend, whose hits are approximations that nothing here has proved",
                "--engine-type default, where a hit is the bytes that the same prefix gave",
                f"Leave --engine-type out, or accept it: {SETTING}=blend",
            )
        )


def get_experimental(seam: Seam) -> Callable[..., list[str]]:
    """The names that an engine asks for, and the attestation among them.

    The server answers in the thread that takes all its messages, so many engines share one attestation a second.
    """
    original = seam.original
    lock = threading.Lock()
    said: list[str] = []
    until = float("-inf")

    @wraps(original)
    def answered(self: Any) -> list[str]:
        nonlocal said, until
        seam.count()
        with lock:
            if time.monotonic() > until:
                said, until = _words(), time.monotonic() + attested.SAID_ANEW_AFTER_S
            return [*original(self), *said]

    return answered


def _words() -> list[str]:
    current = process.current()
    if current is None or current.identity.get("role") != Role.LMCACHE_SERVER.value:
        return []
    return [attested.word(current.attestation(), current.application.counters.values(), tallies.snapshot())]
