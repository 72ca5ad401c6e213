"""What a serde has made of KV is read by the same serde with the same settings, or is a miss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.lmcache_tiers import Memory, apply, key, layout, load, look_up, make_tier, same, store
from support.redis import redis_server

from patches.framework import tallies
from patches.lmcache_admission import PATCH, serdes

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning",  # LMCache's logging
    "ignore::FutureWarning",  # Google's libraries, on Python's and their own releases
)

E4M3 = {"type": "fp8", "fp8_dtype": "float8_e4m3fn"}
E5M2 = {"type": "fp8", "fp8_dtype": "float8_e5m2"}
Start = Callable[[dict[str, Any]], Any]
"""From a serde's settings to the tier as a server that is started with them has it."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(serdes, "_lossy", set())
    monkeypatch.setattr(serdes, "_one_byte", set())
    apply(PATCH, monkeypatch)
    found = Memory()
    yield found
    found.close()


@pytest.fixture(params=["fs", "fs_native", "resp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(kind: str, tmp_path: Path) -> Iterator[Start]:
    if kind != "resp":
        yield lambda serde: make_tier(kind, tmp_path, serde=serde)
        return
    with redis_server(tmp_path) as server:
        yield lambda serde: make_tier(kind, serde=serde, host="127.0.0.1", port=server.port, num_workers=2)


def misses(kind: str) -> int:
    return tallies.snapshot().get(f"lmcache_misses wrong_serde {kind}", 0)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (E4M3, E5M2),
        (E4M3, {}),
        ({}, E4M3),
        ({"type": "asym_k16_v8"}, E4M3),
        ({"type": "aesgcm", "master_key_path": "a"}, {}),
    ],
)
def test_another_serde_is_a_miss_and_its_objects_go(
    memory: Memory, kind: str, start: Start, writer: dict[str, Any], reader: dict[str, Any]
) -> None:
    """Both have the same number of bytes: only what they mean differs."""
    before, keys = misses(kind), [key(1), key(2)]
    with start(writer) as tier:
        assert store(tier, keys, memory.random(layout(), 2))
    with start(reader) as tier:
        assert load(tier, keys, memory.allocate(layout(), 2)) == []
        assert look_up(tier, keys) == []
    assert misses(kind) == before + 2


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (E4M3, {"fp8_dtype": "float8_e4m3fn", "max_workers": 4, "type": "fp8"}),
        ({"type": "aesgcm", "master_key_path": "a"}, {"type": "aesgcm", "master_key_path": "moved"}),
        ({}, {}),
    ],
)
def test_the_same_serde_hits(memory: Memory, start: Start, writer: dict[str, Any], reader: dict[str, Any]) -> None:
    keys = [key(1), key(2)]
    written, read = memory.random(layout(), 2), memory.allocate(layout(), 2)
    with start(writer) as tier:
        assert store(tier, keys, written)
    with start(reader) as tier:
        assert load(tier, keys, read) == [0, 1]
    assert same(written, read)


def test_a_lossy_serde_of_another_lmcache_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its formats and the defaults of its settings are LMCache's own business."""
    from lmcache.v1.distributed.serde import SerdeConfig

    lossy, exact = SerdeConfig("turboquant"), SerdeConfig("aesgcm")
    before = serdes.digest(lossy), serdes.digest(exact)
    monkeypatch.setattr(serdes, "installed_version", lambda _: "0.5.7")
    assert serdes.digest(lossy) != before[0]
    assert serdes.digest(exact) == before[1]


def test_kv_is_never_read_with_another_fp8_format(memory: Memory, tmp_path: Path) -> None:
    """Through LMCache's own serde, on a server that is started anew: stock gives e4m3 bytes read as e5m2."""
    (written,), (same_format, other_format) = (
        memory.allocate(layout(["bfloat16"]), 1),
        memory.allocate(layout(["bfloat16"]), 2),
    )
    written.tensor.copy_(torch.linspace(-400, 400, written.tensor.numel()).view_as(written.tensor))
    with server_with(E4M3, tmp_path) as tier:
        assert store(tier, [key(1)], [written])
        assert load(tier, [key(1)], [same_format]) == [0]
    with server_with(E5M2, tmp_path) as tier:
        assert load(tier, [key(1)], [other_format]) == []
    assert torch.equal(same_format.tensor, written.tensor.to(torch.float8_e4m3fn).to(torch.bfloat16))


@contextmanager
def server_with(serde: dict[str, Any], folder: Path) -> Iterator[Any]:
    """The tier with LMCache's serde around it, as its storage manager puts it there."""
    from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
    from lmcache.v1.distributed.l1_manager import L1Manager
    from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
    from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor

    manager = L1Manager(L1ManagerConfig(L1MemoryManagerConfig(size_in_bytes=16 << 20, use_lazy=False, shm_name="")))
    config = SerdeConfig(serde["type"], {name: value for name, value in serde.items() if name != "type"})
    with make_tier("fs", folder, serde=serde) as inner:
        wrapped = SerdeL2AdapterWrapper(inner, create_serde_processor(config), manager)
        yield wrapped
        wrapped._stop_flag.set()  # else its thread takes the events of whoever gets its descriptors' numbers next
        wrapped._thread.join()
        wrapped._serde.close()
    manager.close()
