"""The client of a folder in the place of LMCache's native one, and sums made on the way."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.lmcache_tiers import Memory, apply, key, layout, load, make_tier, same, store

from patches.lmcache_admission import PATCH, streaming
from patches.lmcache_admission.room import Sealed
from patches.lmcache_admission.seal import crc32c

pytest.importorskip("torch")
pytest.importorskip("lmcache")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning",  # LMCache's logging
    "ignore::FutureWarning",  # Google's libraries, on Python's and their own releases
)

PIECE = 4096


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    apply(PATCH, monkeypatch)
    monkeypatch.setattr(streaming, "PIECE_BYTES", PIECE)
    found = Memory()
    yield found
    found.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.data"))


@pytest.mark.parametrize(("writer", "reader"), [("fs", "fs_native"), ("fs_native", "fs")])
@pytest.mark.parametrize("direct", [False, True])
def test_both_tiers_of_a_folder_write_the_same_files(
    memory: Memory, writer: str, reader: str, direct: bool, tmp_path: Path
) -> None:
    keys = [key(1), key(2, model="Org/Part/m-kv1-0123456789ab", salt="tenant")]
    written, read = memory.random(layout(shape=[3, PIECE]), 2), memory.allocate(layout(shape=[3, PIECE]), 2)
    with make_tier(writer, tmp_path, use_odirect=direct) as tier:
        assert store(tier, keys, written)
    with make_tier(reader, tmp_path, use_odirect=direct) as tier:
        assert load(tier, keys, read) == [0, 1]
    assert same(written, read)


@pytest.mark.parametrize("size", [16, PIECE - 16, PIECE, PIECE + 16, 3 * PIECE, 3 * PIECE + 4000])
@pytest.mark.parametrize("aligned", [False, True])
def test_pieces_are_the_object_and_its_seal(memory: Memory, size: int, aligned: bool) -> None:
    (found,) = memory.random(layout(shape=[size]), 1)
    whole = Sealed(key(1), found, aligned=aligned)
    whole.seal()
    wanted = bytes(whole.byte_array)
    view = streaming.Streamed(key(1), found, aligned=aligned)
    pieces = [bytes(piece) for piece in view.outgoing()]
    assert b"".join(pieces) == wanted
    assert len(pieces) == (1 if aligned else -(-size // PIECE))
    read = memory.allocate(layout(shape=[size]), 1)[0]
    target = streaming.Streamed(key(1), read, aligned=aligned)
    for piece, content in zip(target.incoming(), pieces, strict=True):
        piece[:] = content
    assert target.sum == crc32c(wanted[:size])
    assert target.expected() == target.found()


def test_seal_of_what_is_stored_is_of_its_own_bytes(memory: Memory) -> None:
    """Memory is used again: what stands behind an object is another's seal until its own is written."""
    (found,) = memory.random(layout(shape=[3, PIECE]), 1)
    view = streaming.Streamed(key(1), found)
    list(view.outgoing())
    found.raw_data[0] += 1
    list(view.outgoing())
    assert Sealed(key(1), found).expected() == view.found()


def test_sum_of_an_attempt_that_broke_off_is_not_used(memory: Memory) -> None:
    (found,) = memory.random(layout(shape=[3, PIECE]), 1)
    view = streaming.Streamed(key(1), found)
    list(view.incoming())
    next(view.incoming())[0] ^= 1
    assert view.sum is None
    assert view.expected() == Sealed(key(1), found).expected()


def test_stored_key_is_not_written_again(memory: Memory, tmp_path: Path) -> None:
    with make_tier("fs_native", tmp_path) as tier:
        assert store(tier, [key(1)], memory.random(layout(), 1))
        (before,) = (file.stat() for file in files(tmp_path))
        assert store(tier, [key(1)], memory.random(layout(), 1))
        (after,) = (file.stat() for file in files(tmp_path))
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_deleted_key_is_gone_and_one_that_is_not_there_is_no_trouble(
    memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_tier("fs_native", tmp_path) as tier:
        assert store(tier, [key(1)], memory.random(layout(), 1))
        tier.delete([key(1), key(2)])
        assert files(tmp_path) == []
        assert load(tier, [key(1)], memory.allocate(layout(), 1)) == []
    assert "A file in" not in caplog.text


def test_write_that_fails_leaves_nothing_and_is_logged(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with make_tier("fs_native", tmp_path) as tier:
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            assert not store(tier, [key(1)], memory.random(layout(), 1))
        (scratch,) = (tmp_path / ".splint").iterdir()
        assert files(tmp_path) == list(scratch.iterdir()) == []
    assert "No space left on device" in caplog.text


def test_short_writes_and_reads_go_on(memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, readv = os.write, os.readv
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:1000]))
    monkeypatch.setattr(os, "readv", lambda descriptor, views: readv(descriptor, [views[0][:999]]))
    written, read = memory.random(layout(shape=[3, PIECE]), 2), memory.allocate(layout(shape=[3, PIECE]), 2)
    with make_tier("fs_native", tmp_path) as tier:
        assert store(tier, [key(1), key(2)], written)
        assert load(tier, [key(1), key(2)], read) == [0, 1]
    assert same(written, read)


@pytest.mark.parametrize("direct", [False, True])
def test_page_cache_is_left_out_where_the_operator_wants_it(
    memory: Memory, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, flags = os.open, []

    def noted(path: Any, how: int, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith((".tmp", ".data")):
            flags.append(bool(how & os.O_DIRECT))
        return opened(path, how, *args, **kwargs)

    monkeypatch.setattr(os, "open", noted)
    with make_tier("fs_native", tmp_path, use_odirect=direct) as tier:
        assert store(tier, [key(1)], memory.random(layout(), 1))
        assert load(tier, [key(1)], memory.allocate(layout(), 1)) == [0]
    assert flags == [direct, direct]


@pytest.mark.parametrize("settings", [{}, {"read_ahead_size": 4096}, {"read_ahead_size": 4096, "use_odirect": True}])
def test_file_is_asked_for_ahead_where_the_operator_wants_it(
    memory: Memory, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: advised.append(1))
    with make_tier("fs_native", tmp_path, **settings) as tier:
        assert store(tier, [key(1)], memory.random(layout(), 1))
        assert load(tier, [key(1)], memory.allocate(layout(), 1)) == [0]
    assert bool(advised) == (list(settings) == ["read_ahead_size"])
