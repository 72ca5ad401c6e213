"""A chunk of another dtype or shape on its way between worker and server, on LMCache's own module and contexts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from support.lmcache_tiers import apply

from patches.framework import tallies
from patches.framework.errors import MismatchError
from patches.lmcache_admission import PATCH as ADMISSION
from patches.lmcache_availability.link import Link
from patches.lmcache_availability.results import Results
from patches.lmcache_exact_transfer import PATCH

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning"  # LMCache's logging
)

CHUNK, LAYERS, HIDDEN = 128, 2, 64
SHAPE = (2, LAYERS, CHUNK, HIDDEN)
WRITER, READER = 7, 8


class Done:
    """An answer that has come."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def wait(self, **_: float) -> bool:
        return True

    def result(self, **_: float) -> Any:
        return self.answer


class Direct:
    """A client without a wire: every question is a call of the server's module."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return lambda *args: Done(getattr(self._module, name)(*args))


@pytest.fixture(params=["shm", "pickle"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The server's module, that takes what it is told: the refusal of a second layout has tests of its own."""
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.multiprocess.engine_context import MPCacheServerContext
    from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule

    apply(ADMISSION, monkeypatch, leave_out=["LayoutDescRegistry.register"])
    shared = f"splint_exact_{os.getpid()}" if request.param == "shm" else ""
    memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name=shared)
    context = MPCacheServerContext(StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU")), CHUNK)
    transfers = EngineDrivenTransferModule(context)
    yield transfers
    transfers.close()
    context.close()


def worker(module: Any, instance: int, dtype: str, *, says: str = "") -> Any:
    """A worker's context. It may say another dtype in its registration than it holds."""
    from lmcache.v1.distributed.api import MemoryLayoutDesc
    from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload
    from lmcache.v1.multiprocess.transfer_context.base import EngineDrivenContextMetadata
    from lmcache.v1.multiprocess.transfer_context.worker_transfer import create_engine_driven_context

    answer = module.register_kv_cache_engine_driven_context(
        RegisterEngineDrivenContextPayload(
            instance_id=instance, model_name="model", world_size=1, block_size=CHUNK, num_layers=LAYERS,
            hidden_dim_size=HIDDEN, dtype_str=says or dtype, use_mla=False, num_physical_slots=CHUNK,
        )
    )  # fmt: skip
    held = MemoryLayoutDesc([torch.Size(SHAPE)], [getattr(torch, dtype)])
    metadata = EngineDrivenContextMetadata(held, CHUNK, use_mla=False)
    return create_engine_driven_context(
        metadata, Direct(module), 5.0, shm_name=answer.shm_name, pool_size=answer.pool_size
    )


def key(request: str) -> Any:
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

    return IPCCacheServerKey("model", 1, 0, tuple(range(CHUNK)), 0, CHUNK, request, num_kv_readers=1)


def store(context: Any, instance: int, chunk: Any) -> bool:
    """As the worker's transfer does it."""
    try:
        prepared = context.prepare_store(key("store"), instance)
    except MismatchError:
        return False
    if prepared is None:
        return bool(context.commit_store(key("store"), instance, [chunk]))
    slots, _ = prepared
    slots[0].copy_(chunk)
    return bool(context.commit_store(key("store"), instance, slots))


def load(module: Any, context: Any, instance: int) -> Any:
    """As after a look-up that has found the chunk."""
    server = module.context
    keys = server.resolve_obj_keys(key("load"), [0])[0]
    manager = server.storage_manager._l1_manager
    if any(error.name != "SUCCESS" for error, _ in manager.reserve_read(keys).values()):
        return None
    return context.prepare_retrieve(key("load"), instance)


def codes() -> Any:
    return (
        torch.arange(torch.Size(SHAPE).numel() * 2, dtype=torch.int32).to(torch.uint8).view(torch.bfloat16).view(SHAPE)
    )


def test_same_dtype_goes_both_ways_bit_for_bit(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(PATCH, monkeypatch)
    writer = worker(module, WRITER, "bfloat16")
    assert store(writer, WRITER, codes())
    (chunk,) = load(module, writer, WRITER)
    assert torch.equal(chunk.view(torch.uint8), codes().view(torch.uint8))
    writer.close()


def test_chunk_of_another_dtype_is_a_failed_load(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(PATCH, monkeypatch)
    writer, reader = worker(module, WRITER, "bfloat16"), worker(module, READER, "float16")
    assert store(writer, WRITER, codes())
    before = tallies.snapshot().get("lmcache_misses wrong_layout server", 0)
    assert load(module, reader, READER) is None
    assert tallies.snapshot()["lmcache_misses wrong_layout server"] == before + 1
    writer.close()
    reader.close()


def test_store_of_another_dtype_than_registered_is_refused(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(PATCH, monkeypatch)
    """In shared memory the server's slots differ from what the worker holds, in a message the chunk itself does."""
    other = worker(module, WRITER, "bfloat16", says="float16")
    assert not store(other, WRITER, codes().view(torch.float16))
    assert load(module, other, WRITER) is None
    other.close()


@pytest.mark.parametrize("module", ["shm"], indirect=True)
def test_a_refused_store_counts_once_as_lost_and_not_as_stored(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext

    apply(PATCH, monkeypatch)
    context = worker(module, WRITER, "bfloat16", says="float16")
    transfer = EngineDrivenTransferContext.__new__(EngineDrivenTransferContext)
    transfer._engine_driven_context, transfer._instance_id = context, WRITER
    caches = {"layer.0": torch.zeros(1, 2, CHUNK, HIDDEN, dtype=torch.bfloat16)}
    before = tallies.snapshot()
    Results(Link()).store_sent(transfer.submit_store("store", key("store"), caches, [[0]], None, 1), CHUNK)
    after = tallies.snapshot()
    gained = {name: after.get(name, 0) - before.get(name, 0) for name in after}
    assert gained["lmcache_lost_stores refused"] == 1
    assert gained.get("lmcache_stored_tokens", 0) == 0
    context.close()


def test_stock_gives_the_other_dtype_s_chunk_to_be_converted(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [target.qualname for target in PATCH.targets]
    apply(PATCH, monkeypatch, leave_out=names)
    writer, reader = worker(module, WRITER, "bfloat16"), worker(module, READER, "float16")
    assert store(writer, WRITER, codes())
    (chunk,) = load(module, reader, READER)
    assert chunk.dtype == torch.bfloat16
    chunk = None
    writer.close()
    reader.close()
