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


def reload_weights(seam: Seam) -> Callable[..., None]:
    """A worker reads its weights anew: from where they came, which must hold what it held, and from nowhere else.

    On the CPU, which has no sleep to wake up from, not even so: in vLLM 0.32 the same files, read over the experts of a
    running model, left other weights there.
    """
    original = seam.original

    @wraps(original)
    def reload(self: Any, *args: Any, **kwargs: Any) -> None:
        seam.count()
        if uses_lmcache(self.vllm_config):
            source = (*args[:2], kwargs.get("weights_iterator"), kwargs.get("weights_path"))
            if any(given is not None for given in source):
                _refuse("a reload from elsewhere than the engine's own model")
            elif _on_cpu():
                _refuse("a reload on the CPU, where it leaves experts with other weights than their files have")
            else:
                _require_the_same(self.vllm_config)
        original(self, *args, **kwargs)

    return reload


def start_weight_update(seam: Seam) -> Callable[..., None]:
    """A trainer is about to send weights to a worker, for the model or for its draft."""
    return _refused(seam, "a weight update")


def reset_weights(seam: Seam) -> Callable[..., None]:
    """A worker is to set its weights to zero, as vLLM's weight checker asks: every engine would find what it stores."""
    return _refused(seam, "weights that are set to zero")


def sleep(seam: Seam) -> Callable[..., Any]:
    """The engine core, before it pauses anything: one that wakes up without its weights stores KV of what is there."""
    original = seam.original

    @wraps(original)
    def fall_asleep(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        seam.count()
        if level > _KEEPS_WEIGHTS and uses_lmcache(self.vllm_config):
            _refuse(f"a sleep of level {level}, which throws the weights away (level {_KEEPS_WEIGHTS} keeps them)")
        return original(self, level, *args, **kwargs)

    return fall_asleep


def _refused(seam: Seam, what: str) -> Callable[..., None]:
    original = seam.original

    @wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        seam.count()
        if uses_lmcache(self.vllm_config):
            _refuse(what)
        original(self, *args, **kwargs)

    return begin


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _require_the_same(config: Any) -> None:
    profile = carried(config)
    now = weights_of(config)
    if profile is not None and now != profile.weights:
        _refuse(f"a reload of {now} over {profile.weights}")


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
