"""vLLM's way from arguments to a configuration: the last point before anything heavy starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework import process, settings
from patches.framework.errors import EnvironmentRefusedError
from patches.framework.records import Seam
from patches.lmcache_in_process.fitness import ALTERNATIVE, CONNECTOR, Cache, named_in, unfit

__all__ = ["SETTING", "cache_of", "create_engine_config"]

logger = logging.getLogger(__name__)

SETTING = "SPLINT_LMCACHE_IN_PROCESS"


def create_engine_config(seam: Seam) -> Callable[..., Any]:
    """Refuse the connector where it can't be exact, or leave it out where the operator asked for that."""
    original = seam.original

    @wraps(original)
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        seam.count()
        config = original(self, *args, **kwargs)
        why = _unfit(config)
        if why is None:
            return config
        if settings.get(SETTING) == "leave_out" and config.kv_transfer_config.kv_connector == CONNECTOR:
            logger.warning("Starting without %s (%s=leave_out): %s.", CONNECTOR, SETTING, why)
            # The connector has left its traces in the configuration, so it is made anew.
            self.kv_transfer_config = None
            return original(self, *args, **kwargs)
        process.refuse(EnvironmentRefusedError(f"{CONNECTOR}: {why}", "a connector that is exact here", ALTERNATIVE))
        return config

    return create


def _unfit(config: Any) -> str | None:
    transfer = config.kv_transfer_config
    return unfit(cache_of(config)) if transfer is not None and named_in(vars(transfer)) else None


def cache_of(config: Any) -> Cache:
    """What decides, as vLLM's configuration has it."""
    from vllm.platforms import current_platform

    model = config.model_config
    return Cache(
        on_cpu=current_platform.is_cpu(),
        latent=model.use_mla,
        sparse=hasattr(model.hf_text_config, "index_topk"),
        hybrid=model.is_hybrid,
        format=config.cache_config.cache_dtype,
    )
