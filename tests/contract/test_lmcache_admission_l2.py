"""The LMCache server's second level, on LMCache's own tiers: bit for bit, or a miss."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.lmcache_tiers import (
    DTYPES,
    SEAL,
    Memory,
    apply,
    damaged,
    key,
    layout,
    load,
    look_up,
    make_tier,
    same,
    store,
)  # fmt: skip

from patches.framework import tallies
from patches.framework.errors import EnvironmentRefusedError
from patches.lmcache_admission import PATCH, batches, seal

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning",  # LMCache's logging
    "ignore::FutureWarning",  # Google's libraries, on Python's and their own releases
)

FOLDERS = ("fs", "fs_native")
GENERATED = {"fs": 2000, "fs_native": 5000}
"""Besides them a thousand each of Redis, the local disk, fs://, redis:// and resp://, in the other modules."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    apply(PATCH, monkeypatch)
    found = Memory()
    yield found
    found.close()


def misses(reason: str, tier: str) -> int:
    return tallies.snapshot().get(f"lmcache_misses {reason} {tier}", 0)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.data"))


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_dtype_comes_back_bit_for_bit(memory: Memory, kind: str, tmp_path: Path) -> None:
    with make_tier(kind, tmp_path) as tier:
        for number, dtype in enumerate(DTYPES):
            written = memory.random(layout([dtype]), 3, seed=number)
            keys = [key(100 * number + place, salt=f"tenant-{place}") for place in range(3)]
            assert store(tier, keys, written)
            read = memory.allocate(layout([dtype]), 3)
            assert look_up(tier, keys) == load(tier, keys, read) == [0, 1, 2], dtype
            assert same(written, read), dtype
    assert len(files(tmp_path)) == 3 * len(DTYPES)


@pytest.mark.parametrize("kind", FOLDERS)
def test_groups_of_different_dtypes_and_whole_slots_come_back(memory: Memory, kind: str, tmp_path: Path) -> None:
    desc = layout(["bfloat16", "uint8", "float32"], [3, 5, 7])
    for direct in (False, True):
        with make_tier(kind, tmp_path / str(direct), use_odirect=direct) as tier:
            written, read = memory.random(desc, 9), memory.allocate(desc, 9)
            keys = [key(number) for number in range(9)]
            assert store(tier, keys, written)
            assert load(tier, keys, read) == list(range(9))
            assert same(written, read)


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_task_of_several_batches_names_the_right_objects(
    memory: Memory, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, read, keys = memory.random(layout(), 7), memory.allocate(layout(), 7), [key(number) for number in range(7)]
    monkeypatch.setattr(batches, "BATCH_BYTES", 2 * (written[0].get_size() + SEAL))
    with make_tier(kind, tmp_path) as tier:
        for place in (1, 4):
            assert store(tier, [keys[place]], [written[place]])
        for found in files(tmp_path):
            found.write_bytes(found.read_bytes()[:-1])
        assert store(tier, [keys[place] for place in (0, 2, 3, 5, 6)], [written[place] for place in (0, 2, 3, 5, 6)])
        assert load(tier, keys, read) == [0, 2, 3, 5, 6]
    assert all(bytes(written[place].byte_array) == bytes(read[place].byte_array) for place in (0, 2, 3, 5, 6))


def test_object_says_of_itself_what_it_says_without_room(memory: Memory) -> None:
    (found,) = memory.allocate(layout(["uint8"], [2, 2, 16, 64]), 1)
    assert found.get_size() == len(found.byte_array) == 2 * 2 * 16 * 64
    assert (found.get_shapes(), found.get_dtypes()) == ([torch.Size([2, 2, 16, 64])], [torch.uint8])
    assert tuple(found.tensor.shape) == (2, 2, 16, 64)
    assert found.get_physical_size() >= found.get_size() + SEAL


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize(
    ("writer", "reader", "reason"),
    [
        ((["bfloat16"],), (["uint8"],), "wrong_size"),
        ((["uint8"],), (["bfloat16"],), "wrong_size"),
        ((["bfloat16"],), (["float16"],), "wrong_layout"),
        ((["uint8"],), (["float8_e4m3fn"],), "wrong_layout"),
        ((["uint8"], [2, 4, 8]), (["uint8"], [1, 4, 16]), "wrong_layout"),
        ((["uint8"], [2, 8]), (["uint8", "uint8"], [1, 8]), "wrong_layout"),
    ],
)
def test_another_format_under_the_same_key_is_a_miss_and_goes(
    memory: Memory, kind: str, writer: Any, reader: Any, reason: str, tmp_path: Path
) -> None:
    before = misses(reason, kind)
    with make_tier(kind, tmp_path) as tier:
        assert store(tier, [key(1)], memory.random(layout(*writer), 1))
        assert load(tier, [key(1)], memory.allocate(layout(*reader), 1)) == []
    assert misses(reason, kind) == before + 1
    assert files(tmp_path) == []


@pytest.mark.parametrize("kind", FOLDERS)
def test_exchanged_files_are_misses_and_the_next_store_heals_them(memory: Memory, kind: str, tmp_path: Path) -> None:
    written = memory.random(layout(), 2)
    with make_tier(kind, tmp_path) as tier:
        assert store(tier, [key(1), key(2)], written)
        first, second = files(tmp_path)
        first.rename(tmp_path / "between")
        second.rename(first)
        (tmp_path / "between").rename(second)
        assert load(tier, [key(1), key(2)], memory.allocate(layout(), 2)) == []
    with make_tier(kind, tmp_path) as tier:
        assert look_up(tier, [key(1), key(2)]) == []
        assert store(tier, [key(1), key(2)], written)
        read = memory.allocate(layout(), 2)
        assert load(tier, [key(1), key(2)], read) == [0, 1]
        assert same(written, read)


@pytest.mark.parametrize("kind", FOLDERS)
def test_files_of_two_tenants_that_change_places_are_misses(memory: Memory, kind: str, tmp_path: Path) -> None:
    """Their keys differ by the salt alone, and so must their seals."""
    before, keys = misses("wrong_key", kind), [key(1, salt="one"), key(1, salt="other")]
    with make_tier(kind, tmp_path) as tier:
        assert store(tier, keys, memory.random(layout(), 2))
        first, second = files(tmp_path)
        first.rename(tmp_path / "between")
        second.rename(first)
        (tmp_path / "between").rename(second)
        assert load(tier, keys, memory.allocate(layout(), 2)) == []
    assert misses("wrong_key", kind) == before + 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", FOLDERS)
def test_of_thousands_of_damaged_files_none_is_admitted(memory: Memory, kind: str, tmp_path: Path) -> None:
    chance = random.Random(20261130)
    count = 250
    desc = layout(["uint8"], [2, 2, 8, 32])
    written, read = memory.random(desc, count), memory.allocate(desc, count)
    keys = [key(number) for number in range(count)]
    with make_tier(kind, tmp_path) as tier:
        assert store(tier, keys, written)
        names = files(tmp_path)
        good = [name.read_bytes() for name in names]
        made = 0
        while made < GENERATED[kind]:
            for place, name in enumerate(names):
                bad = damaged(good[place], good[place - 1], chance)
                name.write_bytes(bad)
                made += bad != good[place]
                if bad == good[place]:
                    name.unlink()
            assert load(tier, keys, read) == []
        for name, content in zip(names, good, strict=True):
            name.write_bytes(content)
        assert len(load(tier, keys, read)) == count


@pytest.mark.parametrize("kind", FOLDERS)
def test_what_the_tier_could_not_read_is_a_miss_and_stays(
    memory: Memory, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that failed says nothing of what is stored there."""
    from lmcache.lmcache_native import Bitmap

    with make_tier(kind, tmp_path) as tier:
        assert store(tier, [key(1)], memory.random(layout(), 1))
        read = tier.inner_adapter.query_load_result
        with monkeypatch.context() as failing:
            failing.setattr(tier.inner_adapter, "query_load_result", lambda number: read(number) and Bitmap(1))
            assert load(tier, [key(1)], memory.allocate(layout(), 1)) == []
        assert load(tier, [key(1)], memory.allocate(layout(), 1)) == [0]


@pytest.mark.parametrize("kind", FOLDERS)
def test_objects_of_another_release_are_misses_and_stay(
    memory: Memory, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = misses("other_version", kind)
    with make_tier(kind, tmp_path) as tier:
        with monkeypatch.context() as later:
            later.setattr(seal, "VERSION", seal.VERSION + 1)
            assert store(tier, [key(1)], memory.random(layout(), 1))
        assert load(tier, [key(1)], memory.allocate(layout(), 1)) == []
    assert misses("other_version", kind) == before + 1
    assert len(files(tmp_path)) == 1


def test_objects_without_room_are_neither_stored_nor_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apply(PATCH, monkeypatch, leave_out=["L1MemoryManager.allocate"])
    memory = Memory()
    desc = layout(["uint8"], [4096])
    with make_tier("fs", tmp_path) as tier:
        assert not store(tier, [key(1)], memory.random(desc, 1))
        assert load(tier, [key(1)], memory.allocate(desc, 1)) == []
    memory.close()


@pytest.mark.usefixtures("memory")
def test_tasks_of_nothing_end(tmp_path: Path) -> None:
    with make_tier("fs", tmp_path) as tier:
        store_task, load_task = tier.submit_store_task([], []), tier.submit_load_task([], [])
        assert tier.pop_completed_store_tasks()[store_task].is_successful()
        assert tier.query_load_result(load_task) is not None
        assert tier.query_load_result(load_task) is None


@pytest.mark.parametrize("kind", FOLDERS)
def test_without_the_seals_stock_takes_a_longer_and_a_damaged_file(
    monkeypatch: pytest.MonkeyPatch, kind: str, tmp_path: Path
) -> None:
    apply(PATCH, monkeypatch, leave_out=["create_l2_adapter", "L1MemoryManager.allocate"])
    memory = Memory()
    with make_tier(kind, tmp_path) as tier:
        assert store(tier, [key(1)], memory.random(layout(["bfloat16"]), 1))
        assert load(tier, [key(1)], memory.allocate(layout(["uint8"]), 1)) == [0]
    memory.close()


def test_tier_without_seals_is_refused_until_the_operator_accepts_it(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EnvironmentRefusedError, match="SPLINT_LMCACHE_UNPROTECTED=mock"), make_tier("mock", **MOCK):
        pass
    monkeypatch.setenv("SPLINT_LMCACHE_UNPROTECTED", "p2p,mock")
    with make_tier("mock", **MOCK) as tier:
        assert store(tier, [key(1)], memory.random(layout(), 1))


MOCK: dict[str, Any] = {"max_size_gb": 1, "mock_bandwidth_gb": 10}


@pytest.mark.parametrize("kind", FOLDERS)
def test_two_servers_on_one_folder_never_share_a_temporary_file(memory: Memory, kind: str, tmp_path: Path) -> None:
    with make_tier(kind, tmp_path) as one, make_tier(kind, tmp_path) as other:
        assert len(list((tmp_path / ".splint").iterdir())) == 2
        assert store(one, [key(1)], memory.random(layout(), 1))
        assert store(other, [key(2)], memory.random(layout(), 1))
    assert list((tmp_path / ".splint").iterdir()) == []
    assert len(files(tmp_path)) == 2


@pytest.mark.usefixtures("memory")
def test_temporary_names_of_one_key_differ(tmp_path: Path) -> None:
    with make_tier("fs", tmp_path) as tier:
        pairs = [tier.inner_adapter._key_to_file_and_tmp_path(key(1)) for _ in range(3)]
    assert len({file for file, _ in pairs}) == 1
    assert len({temporary for _, temporary in pairs}) == 3


@pytest.mark.parametrize("setting", ["on", "off"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_files_are_on_the_disk_when_the_operator_wants_them_to_be(
    memory: Memory, kind: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def noted(descriptor: int) -> None:
        seen.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setenv("SPLINT_LMCACHE_FSYNC", setting)
    monkeypatch.setattr(os, "fsync", noted)
    with make_tier(kind, tmp_path) as tier:
        assert store(tier, [key(1), key(2)], memory.random(layout(), 2))
    names = {tmp_path.name, *(file.name for file in files(tmp_path))}
    assert set(seen) == (names if setting == "on" else set())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("kind", FOLDERS)
def test_full_disk_fails_the_store_and_admits_nothing(memory: Memory, kind: str, small_disk: Path) -> None:
    keys = [key(number) for number in range(20)]
    desc = layout(["uint8"], [2, 2, 64, 128])
    written, read = memory.random(desc, 20), memory.allocate(desc, 20)
    with make_tier(kind, small_disk) as tier:
        assert not store(tier, keys, written)
        loaded = load(tier, keys, read)
        assert len(loaded) < 8
        assert same([written[place] for place in loaded], [read[place] for place in loaded])
        for file in files(small_disk):
            file.unlink()
        assert store(tier, keys[:3], written[:3])
        assert load(tier, keys[:3], read[:3]) == [0, 1, 2]
