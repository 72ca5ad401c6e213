"""Which weights: what the identity sees, and what it can't."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from huggingface_hub._revision import ResolvedRevision
from hypothesis import given
from hypothesis import strategies as st

from patches.framework.errors import ProfileError
from patches.lmcache_identity.weights import commit_of, index_digest, weights_identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def layers(count: int, fill: int = 7) -> dict[str, bytes]:
    return {f"model.layers.{n}.{part}.weight": bytes([fill]) * 4096 for n in range(count) for part in ("q", "mlp")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    write_safetensors(path / "model-1.safetensors", layers(4))
    (path / "config.json").write_text("{}")
    return path


def test_a_copy_elsewhere_with_other_times_has_the_same_identity(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    os.utime(copy / "model-1.safetensors", (1, 1))
    assert weights_identity(str(copy)) == weights_identity(str(folder))


@pytest.mark.parametrize(
    "tensors",
    [
        layers(4, fill=8),
        layers(3),
        {**layers(4), "lm_head.weight": b"x"},
        {**layers(4), "model.layers.2.q.weight": b"\x08" * 4096},
        dict(reversed(layers(4).items())),
    ],
    ids=["all values", "a layer less", "a tensor more", "one matrix of one layer", "another order"],
)
def test_other_weights_under_the_same_path_have_another_identity(folder: Path, tensors: dict[str, bytes]) -> None:
    before = weights_identity(str(folder))
    write_safetensors(folder / "model-1.safetensors", tensors)
    assert weights_identity(str(folder)) != before


def test_files_beside_the_weights_do_not_matter_and_a_renamed_weight_file_does(folder: Path) -> None:
    before = weights_identity(str(folder))
    (folder / "training_args.bin").write_bytes(b"optimizer state")
    (folder / "README.md").write_text("new")
    assert weights_identity(str(folder)) == before
    (folder / "model-1.safetensors").rename(folder / "model-2.safetensors")
    assert weights_identity(str(folder)) != before


def test_what_the_digest_does_not_see_is_what_its_docstring_says(folder: Path) -> None:
    """Of a kind with more than 64 tensors some are not sampled: such a change needs another folder or a commit."""
    tensors = {f"layers.0.experts.{number}.w": bytes([1]) * 1024 for number in range(1000)}
    write_safetensors(folder / "model-1.safetensors", tensors)
    before = index_digest(folder)
    write_safetensors(folder / "model-1.safetensors", {**tensors, "layers.0.experts.1.w": bytes([2]) * 1024})
    assert index_digest(folder) == before
    write_safetensors(folder / "model-1.safetensors", {**tensors, "layers.0.experts.0.w": bytes([2]) * 1024})
    assert index_digest(folder) != before


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".gguf"])
def test_files_without_a_header_are_sampled(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"a" * 1_000_000)
    before = weights_identity(str(path))
    path.write_bytes(b"b" * 1_000_000)
    assert weights_identity(str(path)) != before
    assert weights_identity(str(tmp_path)) == weights_identity(str(path))


def test_a_commit_is_taken_where_there_is_one(tmp_path: Path) -> None:
    assert weights_identity("org/name", ResolvedRevision(COMMIT, "main")) == f"commit:{COMMIT}"
    assert weights_identity("org/name", COMMIT) == f"commit:{COMMIT}"
    assert weights_identity("org/name", None, COMMIT) == f"commit:{COMMIT}"
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert weights_identity(str(snapshot)) == f"commit:{COMMIT}"
    assert commit_of(tmp_path) is None


def test_a_local_folder_is_looked_at_even_where_a_revision_was_given(folder: Path) -> None:
    """vLLM ignores --revision for a local path, so it says nothing about the weights."""
    assert weights_identity(str(folder), COMMIT, COMMIT).startswith("index:")


@pytest.mark.parametrize("revision", [None, "main", "v1.0"])
def test_weights_that_nothing_tells_from_others_are_refused(revision: str | None) -> None:
    with pytest.raises(ProfileError, match="Give the commit with --revision"):
        weights_identity("s3://bucket/model", revision)


def test_a_folder_without_weights_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no weight files"):
        weights_identity(str(tmp_path))
    for damaged in (b"", b"\xff" * 16, b"\x05" + bytes(7) + b"{bad}"):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ProfileError, match="can't be read"):
            weights_identity(str(tmp_path))


@given(st.dictionaries(st.from_regex(r"[a-z]{1,3}\.[0-9]{1,2}", fullmatch=True), st.binary(max_size=64), max_size=6),
       st.data())  # fmt: skip
def test_any_change_in_a_small_model_is_seen(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    write_safetensors(path, tensors)
    before = index_digest(path)
    name = data.draw(st.sampled_from(sorted(tensors) or ["new"]))
    changed = data.draw(st.binary(max_size=64).filter(lambda found: found != tensors.get(name)))
    write_safetensors(path, {**tensors, name: changed})
    assert index_digest(path) != before


def test_a_large_mixture_of_experts_is_named_in_a_moment(tmp_path: Path) -> None:
    """16 files with 24,576 tensors; the page cache is warm."""
    for number in range(16):
        parts = {
            f"layers.{layer}.experts.{expert}.{part}.weight": b"x" * 512
            for layer in range(number * 4, number * 4 + 4)
            for expert in range(128)
            for part in ("gate", "up", "down")
        }
        write_safetensors(tmp_path / f"model-{number:05}.safetensors", parts)
    began = time.perf_counter()
    index_digest(tmp_path)
    spent = time.perf_counter() - began
    print(f"index of 16 files with 24,576 tensors: {spent * 1000:.0f} ms")
    assert spent < 5.0
