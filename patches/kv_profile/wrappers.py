"""Derive in the engine core, compare in every worker, complete with the workers' layers, hand to the connectors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework import process
from patches.framework.errors import EnvironmentRefusedError, ProfileError
from patches.framework.records import Seam
from patches.framework.timing import phase
from patches.lmcache_identity.adapters import loading
from patches.lmcache_identity.carrying import attach, carried, missing, publish, uses_lmcache
from patches.lmcache_identity.deriving import derive, fp8_name, groups_of
from patches.lmcache_identity.profile import KVCacheProfile

__all__ = ["add_lora", "create_connector", "executor", "init_worker", "scheduler_config"]

_MP_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector"
_derived: KVCacheProfile | None = None


def executor(seam: Seam) -> Callable[..., None]:
    """The engine core, right before it starts its workers: their copies of the configuration carry the profile."""
    original = seam.original

    @wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        global _derived
        seam.count()
        if uses_lmcache(vllm_config):
            _derived = _derive(vllm_config)
            if _derived is not None:
                attach(vllm_config, _derived)
        original(self, vllm_config, *args, **kwargs)

    return init


def _derive(config: Any) -> KVCacheProfile | None:
    """The profile without groups, or None where the mode only reports that there is none."""
    try:
        with phase("kv profile"):
            profile = derive(config)
            profile.digest  # noqa: B018 - a profile that can't have a fingerprint is none
            return profile
    except ProfileError as error:
        process.refuse(error)
        return None


def add_lora(seam: Seam) -> Callable[..., bool]:
    """The engine core lets its workers load a LoRA adapter: what its files hold then is what its number stands for."""
    original = seam.original

    @wraps(original)
    def add(self: Any, lora_request: Any) -> bool:
        seam.count()
        if not uses_lmcache(self.vllm_config):
            return bool(original(self, lora_request))
        with loading(lora_request):
            return bool(original(self, lora_request))

    return add


def init_worker(seam: Seam) -> Callable[..., None]:
    """A worker, right before it makes its model: it must see what the engine core saw."""
    original = seam.original

    @wraps(original)
    def init(self: Any, all_kwargs: list[dict[str, Any]]) -> None:
        seam.count()
        config = all_kwargs[self.rpc_rank].get("vllm_config")
        if config is not None and uses_lmcache(config):
            _compare(carried(config), _derive(config))
        original(self, all_kwargs)

    return init


def _compare(engine_core: KVCacheProfile | None, worker: KVCacheProfile | None) -> None:
    if engine_core is None:
        process.refuse(missing("this worker"))
    elif worker is not None and worker != engine_core:
        told, seen = engine_core.content(), worker.content()
        names = [name for name, value in told.items() if value != seen[name]]
        process.refuse(
            ProfileError(
                "this worker sees another KV cache than its engine core: "
                + ", ".join(f"{name} {seen[name] or 'none'}, there {told[name] or 'none'}" for name in names),
                "the same model files, configuration and environment for all processes of an engine",
                "Compare the model folders and environments of the nodes.",
            )
        )


def scheduler_config(seam: Seam) -> Callable[..., Any]:
    """The engine core, once all workers have told their layers: every worker's KV configuration carries the whole."""
    original = seam.original

    @wraps(original)
    def generate(kv_cache_configs: list[Any]) -> Any:
        seam.count()
        if _derived is not None:
            whole = _derived.with_groups(groups_of(kv_cache_configs), fp8_name())
            for config in kv_cache_configs:
                attach(config, whole)
        return original(kv_cache_configs)

    return generate


def create_connector(seam: Seam) -> Callable[..., Any]:
    """Scheduler and worker alike: the connector is made only with the profile at hand, and is LMCache's own."""
    original = seam.original

    @wraps(original)
    def create(cls: Any, config: Any, role: Any, kv_cache_config: Any) -> Any:
        seam.count()
        if uses_lmcache(config):
            profile = carried(kv_cache_config)
            if profile is None:
                process.refuse(missing(f"the {role.name.lower()}'s connector"))
            else:
                publish(profile)
        connector = original(cls, config, role, kv_cache_config)
        _check_whose()
        return connector

    return create


def _check_whose() -> None:
    """vLLM falls back to its bundled connector where LMCache's own can't be imported; that one makes bare keys."""
    module = sys.modules.get(_MP_CONNECTOR)
    if module is not None and module.LMCacheMPConnector.__module__ == _MP_CONNECTOR:
        process.refuse(
            EnvironmentRefusedError(
                "LMCache's own connector can't be imported, and vLLM's bundled one would take its place",
                "lmcache.integration.vllm.lmcache_mp_connector",
                "Install an LMCache release that vllm-splint covers; importing that module says what is missing.",
            )
        )
