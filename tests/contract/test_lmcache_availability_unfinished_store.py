"""A prepared store without its end, on the LMCache server's own module with real shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from patches.framework.records import Seam
from patches.lmcache_unfinished_store import PATCH
from patches.lmcache_unfinished_store.wrappers import release_entry

pytest.importorskip("lmcache")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning"  # LMCache's logging
)

CHUNK = 128
INSTANCE = 7


@pytest.fixture
def module() -> Iterator[Any]:
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload
    from lmcache.v1.multiprocess.engine_context import MPCacheServerContext
    from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule

    memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name=f"splint_test_{os.getpid()}")
    config = StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"))
    context = MPCacheServerContext(config, chunk_size=CHUNK)
    transfers = EngineDrivenTransferModule(context)
    transfers.register_kv_cache_engine_driven_context(
        RegisterEngineDrivenContextPayload(
            instance_id=INSTANCE, model_name="model", world_size=1, block_size=CHUNK, num_layers=2, hidden_dim_size=64,
            dtype_str="bfloat16", use_mla=False, num_physical_slots=CHUNK,
        )
    )  # fmt: skip
    yield transfers
    transfers.close()
    context.close()


def store_key() -> Any:
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

    tokens = tuple(range(2 * CHUNK))
    return IPCCacheServerKey("model", 1, 0, tokens, 0, len(tokens), "request", num_kv_readers=1)


def readable(module: Any) -> int:
    """How many chunks of the key a reader could take from L1."""
    context = module.context
    keys = context.resolve_obj_keys(store_key(), [0])[0]
    return sum(error.name == "SUCCESS" for error, _ in context.storage_manager._l1_manager.reserve_read(keys).values())


def prepare_and_leave(module: Any) -> None:
    assert len(module.prepare_store(store_key(), INSTANCE).context["slots"]) == 2
    module.unregister_kv_cache(INSTANCE)


def test_unfinished_store_is_never_readable(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    released = _patched(module, monkeypatch)
    prepare_and_leave(module)
    assert (readable(module), released) == (0, [1])


def test_finished_store_stays_readable(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _patched(module, monkeypatch)
    module.prepare_store(store_key(), INSTANCE)
    assert module.commit_store(store_key(), INSTANCE, b"")
    module.unregister_kv_cache(INSTANCE)
    assert readable(module) == 2


def test_without_the_guard_stock_publishes_what_was_never_written(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = type(module)._release_entry
    monkeypatch.setattr(type(module), "_release_entry", getattr(original, "__wrapped__", original))
    prepare_and_leave(module)
    assert readable(module) == 2


def _patched(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    (target,) = PATCH.targets
    original = type(module)._release_entry
    calls: list[int] = []
    seam = Seam(target.name, getattr(original, "__wrapped__", original), lambda: calls.append(1))
    monkeypatch.setattr(type(module), "_release_entry", release_entry(seam))
    return calls
