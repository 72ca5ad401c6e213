"""Tiers of LMCache's in-process connector, on its own classes: bit for bit, or nothing."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from support.lmcache_in_process import LmClient, Store, lm_server, name
from support.lmcache_tiers import DTYPES, apply, damaged
from support.redis import redis_server

from patches.framework import tallies, values
from patches.framework.errors import EnvironmentRefusedError
from patches.framework.records import Seam
from patches.lmcache_admission_in_process import PATCH

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning",  # LMCache's logging
    "ignore::FutureWarning",  # Google's libraries, on Python's and their own releases
)

TIERS = ("fs", "redis", "resp", "lm")
OPEN = ExitStack()


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("tiers")
    with redis_server(folder) as server, lm_server(folder) as port:
        redis_at = f"127.0.0.1:{server.port}"
        yield {
            "fs": f"fs://localhost:0/{folder}/fs",
            "redis": f"redis://{redis_at}",
            "resp": f"resp://{redis_at}",
            "lm": f"lm://127.0.0.1:{port}",
        }


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> None:
    apply(PATCH, monkeypatch)


@contextmanager
def opened(url: str, dtype: str = "uint8", **settings: Any) -> Iterator[tuple[Store, Any]]:
    engine = Store(dtype, **settings)
    connector = engine.connector(url)
    try:
        yield engine, connector
    finally:
        close(engine, connector)


def close(engine: Store, connector: Any) -> None:
    """Not by LMCache's own ``close``: that of its Redis connectors waits for ever for its queue to end."""
    inner = connector.getWrappedConnector()
    inner = getattr(inner, "_inner", inner)
    if hasattr(inner, "client"):
        engine.loop.call_soon_threadsafe(inner.client.close)
    elif hasattr(inner, "connection"):
        engine.run(inner.connection.aclose())
        engine.run(inner.pool.disconnect())
    else:
        engine.run(connector.close())
    engine.close()


def put(engine: Store, connector: Any, key: Any, written: Any) -> None:
    written.ref_count_up()  # LMCache's wrapper counts down
    engine.run(connector.put(key, written))


def get(engine: Store, connector: Any, key: Any) -> bytes | None:
    found = engine.run(connector.get(key))
    if found is None:
        return None
    content = bytes(found.byte_array)
    assert found.get_shapes() == engine.metadata.get_shapes()
    found.ref_count_down()
    return content


def misses(tier: str) -> int:
    return sum(count for cell, count in tallies.snapshot().items() if cell.endswith(f" {tier}"))


@pytest.mark.parametrize("tier", TIERS)
def test_every_dtype_comes_back_bit_for_bit(urls: dict[str, str], tier: str) -> None:
    for number, dtype in enumerate(DTYPES):
        with opened(urls[tier], dtype) as (engine, connector):
            written = engine.random(number)
            key = name(1000 + number, dtype)
            put(engine, connector, key, written)
            assert engine.run(connector.exists(key))
            assert get(engine, connector, key) == bytes(written.byte_array), dtype
            written.ref_count_down()


@pytest.mark.parametrize("tier", ["fs", "redis", "lm"])
def test_without_the_numbers_int8_is_never_stored(
    urls: dict[str, str], tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache.v1 import protocol

    monkeypatch.delitem(protocol.DTYPE_TO_INT, torch.int8)
    with opened(urls[tier], "int8") as (engine, connector):
        written = engine.random()
        with pytest.raises(KeyError):
            put(engine, connector, name(2, "int8"), written)
        assert not engine.run(connector.exists(name(2, "int8")))
        written.ref_count_down()


@pytest.mark.parametrize("dtype", [*DTYPES, "complex64"])
def test_a_header_says_the_dtype_that_was_stored_or_there_is_none(dtype: str) -> None:
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.protocol import RemoteMetadata, init_remote_metadata_info

    init_remote_metadata_info(1)
    kind = getattr(torch, dtype)
    header = RemoteMetadata(64, [torch.Size([2, 1, 4, 8])], [kind], MemoryFormat.KV_2LTD)
    if dtype == "complex64":
        with pytest.raises(KeyError, match="complex64"):
            header.serialize()
        return
    back = RemoteMetadata.deserialize(header.serialize())
    assert (back.dtypes, back.shapes, back.length) == ([kind], [torch.Size([2, 1, 4, 8])], 64)


@pytest.mark.parametrize("tier", TIERS)
def test_another_row_width_under_the_same_key_is_a_miss(urls: dict[str, str], tier: str) -> None:
    with opened(urls[tier]) as (engine, connector):
        written = engine.random()
        put(engine, connector, name(3), written)
        written.ref_count_down()
    before = misses(tier)
    with opened(urls[tier], head_dim=64) as (engine, connector):
        assert get(engine, connector, name(3)) is None
        assert misses(tier) == before + 1
        assert engine.memory.memory_allocator.pin_allocator.num_active_allocations == 0
        written = engine.random()
        put(engine, connector, name(3), written)
        assert get(engine, connector, name(3)) == bytes(written.byte_array)
        written.ref_count_down()


def raw_files(url: str) -> tuple[Callable[[str], bytes], Callable[[str, bytes], None], Callable[[], list[str]]]:
    folder = Path(url.removeprefix("fs://localhost:0"))

    def read(key: str) -> bytes:
        return (folder / key).read_bytes()

    def write(key: str, content: bytes) -> None:
        (folder / key).write_bytes(content)

    return read, write, lambda: sorted(path.name for path in folder.glob("*7a7a*.data"))


def raw_redis(url: str) -> tuple[Callable[[str], bytes], Callable[[str, bytes], None], Callable[[], list[str]]]:
    client = OPEN.enter_context(redis.Redis.from_url(url.replace("resp://", "redis://")))

    def read(key: str) -> bytes:
        content = client.get(key)
        assert isinstance(content, bytes)
        return content

    def write(key: str, content: bytes) -> None:
        client.set(key, content)

    ending = b"uint8" if url.startswith("resp") else b"kv_bytes"
    return read, write, lambda: sorted(found.decode() for found in client.keys("*7a7a*") if found.endswith(ending))


def raw_lm(url: str) -> tuple[Callable[[str], bytes], Callable[[str, bytes], None], Callable[[], list[str]]]:
    """Its server lists nothing; the keys are known."""
    server = OPEN.enter_context(closing(LmClient(url)))
    return server.get, server.put, lambda: [key.to_string() for key in DAMAGED]


DAMAGED = [name(0x7A7A0000 + number) for number in range(50)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("tier", "rounds"), [("fs", 20), ("redis", 20), ("resp", 20), ("lm", 3)])
def test_of_many_damaged_objects_none_is_admitted_or_found_again(urls: dict[str, str], tier: str, rounds: int) -> None:
    """50 objects a round. ``lm://`` takes 44 ms for an answer with a body, in stock too."""
    chance = random.Random(20261130)
    with opened(urls[tier]) as (engine, connector), OPEN:
        written = [engine.random(number) for number in range(len(DAMAGED))]
        read, write, listed = {"fs": raw_files, "lm": raw_lm}.get(tier, raw_redis)(urls[tier])

        def store() -> list[str]:
            for key, found in zip(DAMAGED, written, strict=True):
                put(engine, connector, key, found)
            return listed()

        stored = store()
        good = [read(one) for one in stored]
        assert len(stored) == len(DAMAGED)
        before = misses(tier)
        for _ in range(rounds):
            for place, one in enumerate(store()):
                bad = damaged(good[place], good[place - 1], chance)
                write(one, bad if bad != good[place] else b"")
            assert [get(engine, connector, key) for key in DAMAGED] == [None] * len(DAMAGED)
            assert not any(engine.run(connector.exists(key)) or connector.exists_sync(key) for key in DAMAGED)
        assert misses(tier) == before + rounds * len(DAMAGED)
        store()
        for key, found in zip(DAMAGED, written, strict=True):
            assert engine.run(connector.exists(key))
            assert connector.exists_sync(key)
            assert get(engine, connector, key) == bytes(found.byte_array)
            found.ref_count_down()
        gc.collect()  # what LMCache's own Redis connector has read in vain is the collector's to give back
        assert engine.memory.memory_allocator.pin_allocator.num_active_allocations == 0


@pytest.mark.timeout(300)
def test_an_answer_of_resp_that_comes_before_it_is_waited_for_is_not_lost(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from patches.lmcache_admission.resp_client import RespClient

    submit = RespClient.submit_batch_exists

    def submit_and_pause(self: RespClient, keys: list[str]) -> int:
        number = submit(self, keys)
        time.sleep(0.2)
        return number

    with opened(urls["resp"]) as (engine, connector):
        found = engine.random(1)
        put(engine, connector, name(1), found)
        monkeypatch.setattr(RespClient, "submit_batch_exists", submit_and_pause)
        assert connector.exists_sync(name(1))
        found.ref_count_down()


def test_file_that_goes_between_reading_and_checking_is_a_miss_and_gives_its_memory_back(urls: dict[str, str]) -> None:
    key = name(0x7B7B0000)
    with opened(urls["fs"]) as (engine, connector):
        written = engine.random(1)
        put(engine, connector, key, written)
        inner = connector.getWrappedConnector()._inner
        read, views = inner.get, []

        async def read_and_remove(key: Any) -> Any:
            views.append(await read(key))
            inner._get_file_path(key).unlink()
            return views[-1]

        inner.get = read_and_remove
        assert get(engine, connector, key) is None
        assert views[0].inner.get_ref_count() == 0
        written.ref_count_down()


@pytest.mark.parametrize("tier", TIERS)
def test_batches_stop_at_the_first_object_that_is_not_its_key_s(urls: dict[str, str], tier: str) -> None:
    keys = [name(50 + number) for number in range(3)]
    with opened(urls[tier]) as (engine, connector):
        written = [engine.random(number) for number in range(3)]
        for key, found in zip(keys, written, strict=True):
            put(engine, connector, key, found)
        read = engine.run(connector.batched_get_non_blocking("look-up", [*keys[:2], name(99), keys[2]]))
        assert [bytes(found.byte_array) for found in read] == [bytes(found.byte_array) for found in written[:2]]
        for found in read + written:
            found.ref_count_down()


def test_strange_header_of_lm_is_a_miss_and_its_body_is_read_away(urls: dict[str, str]) -> None:
    from lmcache.v1.memory_management import MemoryFormat

    key, strange = name(320), {
        "dtype": torch.float8_e5m2, "shape": torch.Size([2, 2, 16, 32]), "fmt": MemoryFormat.KV_2TD,
    }  # fmt: skip
    with opened(urls["lm"]) as (engine, connector), closing(LmClient(urls["lm"])) as server:
        written = engine.random()
        put(engine, connector, key, written)
        whole = server.get(key.to_string())
        for part, value in strange.items():
            before = misses("lm")
            server.put(key.to_string(), whole, **{part: value})
            assert get(engine, connector, key) is None
            assert (misses("lm"), engine.run(connector.exists(key))) == (before + 1, False), part
            put(engine, connector, key, written)
            assert get(engine, connector, key) == bytes(written.byte_array)
        written.ref_count_down()


@pytest.mark.parametrize("tier", TIERS)
def test_what_memory_is_too_short_for_is_neither_damaged_nor_forgotten(
    urls: dict[str, str], tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = name(330)
    with opened(urls[tier]) as (engine, connector):
        written = engine.random()
        put(engine, connector, key, written)
        before = misses(tier)
        with monkeypatch.context() as short, suppress(AttributeError):  # LMCache's resp:// connector raises that
            short.setattr(engine.memory, "allocate", lambda *_, **__: None)
            assert get(engine, connector, key) is None
        assert (misses(tier), engine.run(connector.exists(key))) == (before, True)
        assert get(engine, connector, key) == bytes(written.byte_array)
        written.ref_count_down()


def test_answers_of_lm_do_not_mix_under_load(urls: dict[str, str]) -> None:
    keys = [name(200 + number) for number in range(40)]
    with opened(urls["lm"]) as (engine, connector):
        written = [engine.random(number) for number in range(len(keys))]
        for key, found in zip(keys, written, strict=True):
            put(engine, connector, key, found)

        async def all_at_once() -> list[Any]:
            return await asyncio.gather(*(connector.get(key) for key in keys))

        read = engine.run(all_at_once())
        assert [bytes(found.byte_array) for found in read] == [bytes(found.byte_array) for found in written]
        for found in read + written:
            found.ref_count_down()


def test_lm_answer_without_memory_for_it_is_read_away(urls: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(urls["lm"]) as (engine, connector):
        written = engine.random()
        put(engine, connector, name(300), written)
        monkeypatch.setattr(engine.memory, "allocate", lambda *_, **__: None)
        assert get(engine, connector, name(300)) is None
        monkeypatch.undo()
        apply(PATCH, monkeypatch)
        assert engine.run(connector.exists(name(300)))
        assert not engine.run(connector.exists(name(301)))
        assert get(engine, connector, name(300)) == bytes(written.byte_array)
        written.ref_count_down()


def test_lm_connection_that_broke_is_replaced(urls: dict[str, str]) -> None:
    with opened(urls["lm"]) as (engine, connector):
        written = engine.random()
        put(engine, connector, name(310), written)
        connector._connector._inner.client_socket.shutdown(2)
        with pytest.raises((BrokenPipeError, ConnectionError)):
            engine.run(connector.get(name(310)))
        assert get(engine, connector, name(310)) == bytes(written.byte_array)
        written.ref_count_down()


@pytest.mark.parametrize(("url", "settings"), [("blackhole://", {}), ("fs", {"remote_serde": "cachegen"})])
def test_what_carries_no_seal_is_refused_until_it_is_accepted(
    urls: dict[str, str], url: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache.v1.exceptions import IrrecoverableException

    engine = Store("bfloat16", **settings)
    try:
        with pytest.raises(IrrecoverableException, match="SPLINT_LMCACHE_UNPROTECTED"):
            engine.connector(urls.get(url, url))
        monkeypatch.setenv("SPLINT_LMCACHE_UNPROTECTED", "blackhole,cachegen")
        engine.connector(urls.get(url, url))
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("word", "settings"),
    [
        ("gds", {"gds_path": "/tmp/gds"}),
        ("nixl_storage", {"extra_config": {"enable_nixl_storage": True}}),
        ("p2p", {"enable_p2p": True}),
        ("pd", {"enable_pd": True}),
        ("maru", {"maru_path": "maru://localhost:1"}),
        ("plugin", {"storage_plugins": ["mine"]}),
    ],
)
def test_a_backend_that_carries_no_seal_is_refused_until_it_is_accepted(
    word: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from patches.lmcache_admission_in_process.remote import create_backends

    blank = {"enable_pd": False, "enable_p2p": False, "gds_path": None, "maru_path": None, "storage_plugins": None}
    made: list[Any] = []
    create = create_backends(Seam("CreateStorageBackends", made.append, lambda: None))
    create(SimpleNamespace(extra_config=None, **blank))
    config = SimpleNamespace(**{"extra_config": {"audit_backend_enabled": False}, **blank, **settings})
    with pytest.raises(EnvironmentRefusedError, match=f"SPLINT_LMCACHE_UNPROTECTED={word}"):
        create(config)
    monkeypatch.setenv("SPLINT_LMCACHE_UNPROTECTED", word)
    create(config)
    assert len(made) == 2


def test_the_setting_knows_every_tier_of_lmcache() -> None:
    """By LMCache's own sources: many of its modules need libraries that are not here."""
    import lmcache

    home = Path(lmcache.__file__).parent / "v1"
    tiers = _written(home / "distributed" / "l2_adapters", r'register_l2_adapter_type\(\s*"([\w-]+)"')
    schemes = _written(home / "storage_backend" / "connector", r'super\(\).__init__\("([\w-]+)://')
    assert (len(tiers), len(schemes)) == (21, 19)
    assert tiers - {"fs", "fs_native", "resp"} | schemes - {"fs", "lm", "redis", "resp"} <= set(values.UNPROTECTED)


def _written(folder: Path, pattern: str) -> set[str]:
    return {name for file in folder.glob("*_adapter.py") for name in re.findall(pattern, file.read_text())}


def test_a_refusal_in_lmcache_s_loader_of_plugins_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache logs whatever a plugin raises and goes on without it."""
    from lmcache.v1 import storage_backend
    from lmcache.v1.storage_backend.connector.blackhole_connector import BlackholeConnector

    class Mine(BlackholeConnector):  # type: ignore[misc]
        def __init__(self, **_: Any) -> None:
            super().__init__()

    monkeypatch.setitem(sys.modules, "plugin_of_somebody", SimpleNamespace(Mine=Mine))
    place = {"module_path": "plugin_of_somebody", "class_name": "Mine"}
    extra = {f"remote_storage_plugin.mine.{word}": value for word, value in place.items()}
    engine = Store("bfloat16", remote_storage_plugins=["mine"], extra_config=extra)
    given = (engine.config, engine.metadata, engine.loop, "cpu")
    try:
        with pytest.raises(EnvironmentRefusedError, match="SPLINT_LMCACHE_UNPROTECTED=plugin"):
            storage_backend.CreateStorageBackends(*given)
        monkeypatch.setenv("SPLINT_LMCACHE_UNPROTECTED", "plugin")
        assert "RemoteBackend-mine" in storage_backend.CreateStorageBackends(*given)
    finally:
        engine.close()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float8_e4m3fn"])
def test_cachegen_and_one_byte_kv_are_refused(dtype: str) -> None:
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.naive_serde import CreateSerde

    metadata = LMCacheMetadata("model", 1, 1, 0, 0, getattr(torch, dtype), (2, 2, 16, 2, 32))
    with pytest.raises(EnvironmentRefusedError, match="lossy serde cachegen"):
        CreateSerde("cachegen", metadata, None)
    assert CreateSerde("naive", metadata, None)


def test_tensor_that_goes_to_other_ranks_is_as_long_as_theirs() -> None:
    engine = Store()
    one = engine.random()
    two = engine.memory.batched_allocate(engine.metadata.get_shapes(), engine.metadata.get_dtypes(), 2)
    assert one.raw_tensor.numel() == one.get_size() == one.metadata.get_size() == len(one.byte_array)
    for found in [one, *two]:
        assert found.get_physical_size() >= found.get_size() + 80
        assert found.get_shapes() == engine.metadata.get_shapes()
        found.ref_count_down()
    engine.close()


def test_through_lmcache_s_own_backend_a_damaged_object_is_not_loaded_and_not_found_again(tmp_path: Path) -> None:
    engine = Store(remote_url=f"fs://localhost:0/{tmp_path}")
    backend = engine.remote()
    try:
        written = engine.random()
        backend.submit_put_task(name(1), written).result(20)
        assert backend.contains(name(1))
        read = backend.get_blocking(name(1))
        assert bytes(read.byte_array) == bytes(written.byte_array)
        (file,) = tmp_path.glob("*.data")
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        assert backend.get_blocking(name(1)) is None
        assert not backend.contains(name(1))
        for found in (read, written):
            found.ref_count_down()
    finally:
        engine.close()


def test_temporary_names_of_fs_differ(urls: dict[str, str]) -> None:
    with opened(urls["fs"]) as (_, connector):
        pairs = [connector._connector._get_file_and_tmp_path(name(1)) for _ in range(3)]
    assert len({file for file, _ in pairs}) == 1
    assert len({temporary for _, temporary in pairs}) == 3


@contextmanager
def on_disk(folder: Path, dtype: str = "uint8", **settings: Any) -> Iterator[tuple[Store, Any]]:
    engine = Store(dtype, local_disk=str(folder), max_local_disk_size=0.1, **settings)
    disk = engine.disk()
    try:
        yield engine, disk
    finally:
        disk.close()
        engine.close()


def save(disk: Any, key: Any, written: Any) -> None:
    written.ref_count_up()
    disk.disk_worker.insert_put_task(key)
    disk.async_save_bytes_to_disk(key, written)


def blocking(disk: Any, key: Any) -> bytes | None:
    found = disk.get_blocking(key)
    if found is None:
        return None
    content = bytes(found.byte_array)
    found.ref_count_down()
    return content


@pytest.mark.parametrize("dtype", DTYPES)
def test_local_disk_gives_back_every_dtype_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    with on_disk(tmp_path, dtype) as (engine, disk):
        written = [engine.random(number) for number in range(3)]
        keys = [name(number, dtype) for number in range(3)]
        for key, found in zip(keys, written, strict=True):
            save(disk, key, found)
        assert blocking(disk, keys[0]) == bytes(written[0].byte_array)
        together = disk.batched_get_blocking(keys)
        prefetched = engine.run(disk.batched_get_non_blocking("look-up", keys))
        for read in (together, prefetched):
            assert [bytes(found.byte_array) for found in read] == [bytes(found.byte_array) for found in written]
        for found in prefetched:
            found.unpin()
        for found in [*written, *together, *prefetched]:
            found.ref_count_down()


def test_engines_in_one_folder_do_not_overwrite_each_other(tmp_path: Path) -> None:
    with on_disk(tmp_path) as (one, disk), on_disk(tmp_path, head_dim=64) as (other, second):
        written, foreign = one.random(1), other.random(2)
        save(disk, name(1), written)
        save(second, name(1), foreign)
        assert blocking(disk, name(1)) == bytes(written.byte_array)
        assert blocking(second, name(1)) == bytes(foreign.byte_array)
        written.ref_count_down()
        foreign.ref_count_down()


@pytest.mark.timeout(300)
def test_of_a_thousand_damaged_files_of_the_local_disk_none_is_admitted(tmp_path: Path) -> None:
    chance = random.Random(20261130)
    keys = [name(number) for number in range(50)]
    with on_disk(tmp_path) as (engine, disk):
        written = [engine.random(number) for number in range(len(keys))]
        for turn in range(20):
            for key, found in zip(keys, written, strict=True):
                save(disk, key, found)
            paths = [Path(disk.dict[key].path) for key in keys]
            good = [path.read_bytes() for path in paths]
            for place, path in enumerate(paths):
                bad = damaged(good[place], good[place - 1], chance)
                path.write_bytes(bad if bad != good[place] else b"")
            if turn % 2:
                assert disk.batched_get_blocking(keys) == [None] * len(keys)
            else:
                assert engine.run(disk.batched_get_non_blocking("look-up", keys)) == []
                disk.batched_remove([key for key in keys if key in disk.dict])
        for found in written:
            found.ref_count_down()


def test_local_disk_that_is_full_stores_nothing_and_goes_on(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], check=True)
    try:
        with on_disk(tmp_path) as (engine, disk):
            written = engine.random()
            for number in range(20):
                save(disk, name(number), written)
            assert 0 < len(disk.dict) < 20
            assert {blocking(disk, key) for key in list(disk.dict)} == {bytes(written.byte_array)}
            written.ref_count_down()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
