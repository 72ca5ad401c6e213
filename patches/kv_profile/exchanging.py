"""Weights exchanged in a running engine with LMCache: its keys would go on naming those that it started with."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework import log, process
from patches.framework.errors import EnvironmentRefusedError
from patches.framework.records import Seam
from patches.lmcache_identity.carrying import carried, uses_lmcache
from patches.lmcache_identity.deriving import weights_of

__all__ = ["reload_weights", "reset_weights", "sleep", "start_weight_update"]

_KEEPS_WEIGHTS = 1
"""vLLM's deepest sleep in which the weights are kept, in the host's memory."""


def reload_weights(seam: Seam) -> Callable[..., Any]:
    """A worker reads its weights anew: from where they came, which must hold what it held, and from nowhere else.

    On the CPU, which has no sleep to wake up from, not even so: in vLLM 0.32 the same files, read over the experts of a
    running model, left other weights there.
    """
    return _guarded(seam, _brought_by_a_reload)


def start_weight_update(seam: Seam) -> Callable[..., Any]:
    """A trainer is about to send weights to a worker, for the model or for its draft."""
    return _guarded(seam, lambda *_, **__: "a weight update")


def reset_weights(seam: Seam) -> Callable[..., Any]:
    """A worker is to set its weights to zero, as vLLM's weight checker asks: every engine would find what it stores."""
    return _guarded(seam, lambda *_, **__: "weights that are set to zero")


def sleep(seam: Seam) -> Callable[..., Any]:
    """The engine core, before it pauses anything: one that wakes up without its weights stores KV of what is there."""
    return _guarded(seam, _lost_in_a_sleep)


def _guarded(seam: Seam, change: Callable[..., str | None]) -> Callable[..., Any]:
    """Refuse the call where ``change``, given the configuration and the call's own arguments, names other weights."""
    original = seam.original

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        seam.count()
        if uses_lmcache(self.vllm_config) and (what := change(self.vllm_config, *args, **kwargs)):
            _refuse(what)
        return original(self, *args, **kwargs)

    return call


def _brought_by_a_reload(
    config: Any, weights_iterator: Any = None, weights_path: str | None = None, *_: Any, **__: Any
) -> str | None:
    from vllm.platforms import current_platform

    if weights_iterator is not None or weights_path is not None:
        return "a reload from elsewhere than the engine's own model"
    if current_platform.is_cpu():
        return "a reload on the CPU, where it leaves experts with other weights than their files have"
    profile, now = carried(config), weights_of(config)
    if profile is None or now == profile.weights:
        return None
    return f"a reload of {now} over {profile.weights}"


def _lost_in_a_sleep(_config: Any, level: int = 1, *_: Any, **__: Any) -> str | None:
    if level <= _KEEPS_WEIGHTS:
        return None
    return f"a sleep of level {level}, which throws the weights away (level {_KEEPS_WEIGHTS} keeps them)"


def _refuse(what: str) -> None:
    """The call fails and the engine goes on as it is; in report mode it is only said.

    Raises:
        EnvironmentRefusedError: in enforce mode.
    """
    error = EnvironmentRefusedError(
        f"{what}, in an engine with LMCache: KV of the old weights would be found, and that of the new ones stored,"
        " under the old ones' keys",
        "the weights that the engine started with",
        "Start the engine anew with the new weights in a folder of their own or with their commit, or without LMCache.",
    )
    current = process.current()
    if current is None or current.enforcing:
        raise error
    log.tell("weights", f"{error}")
