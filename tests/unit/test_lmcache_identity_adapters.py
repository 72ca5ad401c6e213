"""Which LoRA adapter: every byte of it counts, and a number stands for what was loaded under it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework.records import Seam
from patches.kv_profile.wrappers import add_lora
from patches.lmcache_identity import adapters
from patches.lmcache_identity.adapters import adapter_identity, loading

numbers = count(1)


@pytest.fixture(autouse=True)
def _nothing_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_bound", {})


@pytest.fixture
def times() -> Iterator[int]:
    """Modification times that differ, however coarse the file system's are."""
    return count(10**18, 10**9)


def request(folder: Path, **fields: Any) -> Any:
    """What a ``LoRARequest`` says of an adapter, with a number of its own."""
    number = next(numbers)
    given = {"lora_name": f"adapter {number}", "lora_int_id": number, "load_inplace": False, "is_3d_lora_weight": False}
    return SimpleNamespace(**given | {"lora_path": str(folder)} | fields)


def written(folder: Path, content: bytes, settings: str = "{}", name: str = "adapter_model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    (folder / "adapter_config.json").write_text(settings)
    return folder


def layered(folder: Path, changed: int | None = None) -> Path:
    """An adapter of 80 layers with one tensor each, one of them other than usual."""
    parts = [(b"q" if layer == changed else b"a") * 1024 for layer in range(80)]
    header = {
        f"layers.{layer}.q_proj.lora_A.weight": {
            "dtype": "U8", "shape": [1024], "data_offsets": [1024 * layer, 1024 * layer + 1024],
        }
        for layer in range(80)
    }  # fmt: skip
    text = json.dumps(header).encode()
    return written(folder, len(text).to_bytes(8, "little") + text + b"".join(parts))


def test_a_change_in_any_layer_is_seen(tmp_path: Path) -> None:
    found = {adapter_identity(request(layered(tmp_path / "base")))}
    found |= {adapter_identity(request(layered(tmp_path / f"changed {layer}", layer))) for layer in range(80)}
    assert len(found) == 81


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"])
@pytest.mark.parametrize("place", [0, 1, 2049, 4095])
def test_any_byte_is_seen(tmp_path: Path, place: int, name: str) -> None:
    content = bytearray(4096)
    before = adapter_identity(request(written(tmp_path / "one", bytes(content), name=name)))
    content[place] ^= 1
    assert adapter_identity(request(written(tmp_path / "other", bytes(content), name=name))) != before


def test_how_it_is_to_be_read_is_seen(tmp_path: Path) -> None:
    plain = written(tmp_path / "plain", b"a" * 64)
    other = written(tmp_path / "other", b"a" * 64, settings='{"r": 8}')
    found = [request(plain), request(other), request(plain, is_3d_lora_weight=True)]
    assert len({adapter_identity(each) for each in found}) == len(found)


def test_a_copy_under_another_name_is_the_same(tmp_path: Path) -> None:
    one = written(tmp_path / "one", b"a" * 64)
    shutil.copytree(one, tmp_path / "copy")
    (tmp_path / "copy" / "optimizer.pt").write_bytes(b"no part of the adapter")
    assert adapter_identity(request(tmp_path / "copy")) == adapter_identity(request(one))


def test_what_was_loaded_is_not_told_any_more_once_its_files_are_others(tmp_path: Path, times: Iterator[int]) -> None:
    """Workers hold the first content under the first number, and would load the second if they had to drop it."""
    first = request(written(tmp_path / "now", b"a" * 64))
    with loading(first):
        pass
    alone = adapter_identity(first)
    second = request(overwritten(tmp_path / "now", b"b" * 64, times))
    with loading(second):
        pass
    assert alone is not None
    assert adapter_identity(second) not in (None, alone)
    assert adapter_identity(first) is None
    overwritten(tmp_path / "now", b"a" * 64, times)
    assert adapter_identity(first) is None
    assert adapter_identity(second) is None


def overwritten(folder: Path, content: bytes, times: Iterator[int]) -> Path:
    written(folder, content)
    now = next(times)
    os.utime(folder / "adapter_model.safetensors", ns=(now, now))
    return folder


def test_a_number_that_is_used_again_for_another_adapter_is_not_told(tmp_path: Path) -> None:
    first = request(written(tmp_path / "one", b"a" * 64))
    adapter_identity(first)
    other = request(written(tmp_path / "other", b"b" * 64), lora_int_id=first.lora_int_id)
    assert adapter_identity(other) is None


def test_files_that_are_touched_and_the_same_are_still_told(tmp_path: Path, times: Iterator[int]) -> None:
    asked = request(written(tmp_path / "one", b"a" * 64))
    before = adapter_identity(asked)
    overwritten(tmp_path / "one", b"a" * 64, times)
    assert adapter_identity(asked) == before is not None


def test_files_that_change_while_they_are_loaded_are_not_told(tmp_path: Path, times: Iterator[int]) -> None:
    asked = request(written(tmp_path / "one", b"a" * 64))
    with loading(asked):
        overwritten(tmp_path / "one", b"b" * 64, times)
    assert adapter_identity(asked) is None


def test_files_that_come_with_the_loading_are_told(tmp_path: Path) -> None:
    """A repository of the model hub is fetched by the first load."""
    asked = request(tmp_path / "one")
    with loading(asked):
        written(tmp_path / "one", b"a" * 64)
    assert adapter_identity(asked) is not None


def test_a_load_in_place_takes_the_number_s_identity(tmp_path: Path) -> None:
    asked = request(written(tmp_path / "one", b"a" * 64))
    assert adapter_identity(asked) is not None
    again = request(tmp_path / "one", lora_int_id=asked.lora_int_id, load_inplace=True)
    assert adapter_identity(again) is None
    with loading(again):
        pass
    assert adapter_identity(asked) is None


@pytest.mark.parametrize(("connector", "told"), [("LMCacheMPConnector", False), ("NixlConnector", True)])
def test_only_beside_lmcache_a_load_binds_the_number(
    tmp_path: Path, times: Iterator[int], connector: str, told: bool
) -> None:
    given: list[tuple[Any, ...]] = []

    def original(*arguments: Any) -> bool:
        given.append(arguments)
        return True

    executor = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=connector)))
    load = add_lora(Seam("Executor.add_lora", original, lambda: None))
    asked = request(written(tmp_path / "one", b"a" * 64))
    assert load(executor, asked)
    assert given == [(executor, asked)]
    overwritten(tmp_path / "one", b"b" * 64, times)
    assert (adapter_identity(asked) is not None) is told


def test_a_load_that_fails_binds_nothing(tmp_path: Path) -> None:
    asked = request(written(tmp_path / "one", b"a" * 64))
    with pytest.raises(ValueError, match="too large"), loading(asked):
        raise ValueError("too large")
    written(tmp_path / "one", b"b" * 65)
    assert adapter_identity(asked) is not None


def test_what_is_not_there_or_has_no_weights_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "missing"):
        asked = request(tmp_path / folder)
        assert adapter_identity(asked) is None
        assert adapter_identity(asked) is None
    assert [record.message.count("can't be told from others") for record in caplog.records] == [1, 1]


def test_a_large_adapter_is_read_once_and_its_requests_cost_next_to_nothing(tmp_path: Path) -> None:
    asked = request(written(tmp_path / "large", bytes(200_000_000)))
    began = time.perf_counter()
    with loading(asked):
        pass
    loaded = time.perf_counter()
    for _ in range(1000):
        adapter_identity(asked)
    spent = time.perf_counter() - loaded
    print(f"200 MB: {(loaded - began) * 1000:.0f} ms to load, {spent * 1000:.0f} us a request")
    assert loaded - began < 20
    assert spent < 5
