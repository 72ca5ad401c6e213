"""Which weights: a commit where there is one, else a digest of the weight files' index. Standard library only.

What the digest sees of a folder: each weight file's name and size; of safetensors files the whole header (names,
dtypes, shapes and places of all tensors) and 256 bytes from the middle of up to 64 tensors of each kind (one kind is
``layers.#.self_attn.q_proj.weight`` over all layers); of other files 64 windows of 4 KiB.

What it does not see: a change that leaves every sampled byte as it was, such as one expert's weights replaced among
thousands. Put such weights into another folder (its path stands in the key, too), or give them a commit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from patches.framework.errors import ProfileError

__all__ = ["commit_of", "index_digest", "weights_identity"]

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES_A_KIND = 64
SAMPLE_BYTES = 256
WINDOWS = 64
WINDOW_BYTES = 4096
_LONGEST_HEADER = 100 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUMBER = re.compile(r"\d+")


def weights_identity(model: str, revision: Any = None, commit: str | None = None) -> str:
    """The identity of a model's weights.

    Args:
        model: A folder, a single file, or a name on the model hub.
        revision: The revision that was asked for; vLLM's own carries the commit that it was resolved to.
        commit: The commit of the model's configuration, where Transformers knows it.

    Returns:
        ``commit:<40 hex digits>`` or ``index:<64 hex digits>``.

    Raises:
        ProfileError: neither a commit nor weight files are known.
    """
    path = Path(model)
    found = commit_of(path) if path.exists() else _resolved(revision) or commit
    if found:
        return f"commit:{found}"
    if path.exists():
        return f"index:{index_digest(path)}"
    raise ProfileError(
        f"the weights of {model!r} have no known commit and lie in no local folder",
        "something that tells these weights from others",
        "Give the commit with --revision, or load the model from a local folder.",
    )


def commit_of(path: Path) -> str | None:
    """The commit of a folder in the model hub's cache (``.../snapshots/<commit>``), else None."""
    parts = path.resolve().parts if path.is_dir() else ()
    return next(
        (part for before, part in pairwise(parts) if before == "snapshots" and _is_commit(part)),
        None,
    )


def _resolved(revision: Any) -> str | None:
    """The commit that a revision names: huggingface_hub's carries it, and forty hex digits are one."""
    found = getattr(revision, "resolved", revision)
    return found if isinstance(found, str) and _is_commit(found) else None


def _is_commit(text: str) -> bool:
    return _COMMIT.fullmatch(text) is not None


def index_digest(path: Path) -> str:
    """SHA-256 over what the module's docstring says, in hex. The same for a copy elsewhere.

    Args:
        path: A folder of weight files, or one such file.

    Raises:
        ProfileError: there are no weight files, or one can't be read.
    """
    files = _weight_files(path)
    digest = hashlib.sha256()
    places: dict[str, list[tuple[Path, int, int]]] = {}
    try:
        for file in files:
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as opened:
                for part in _index(file, opened, places):
                    digest.update(part)
        for part in _samples(places):
            digest.update(part)
    except (OSError, ValueError) as error:
        raise ProfileError(
            f"the weight files in {path} can't be read ({error})", "whole, readable weight files", "Copy them again."
        ) from error
    return digest.hexdigest()


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    safe = [file for file in files if file.suffix == ".safetensors"]
    if not files:
        raise ProfileError(
            f"no weight files in {path}", f"files that end in {', '.join(SUFFIXES)}", "Check the model's path."
        )
    return safe or files


def _index(file: Path, opened: BinaryIO, places: dict[str, list[tuple[Path, int, int]]]) -> Iterator[bytes]:
    """A file's own index; the places of its tensors are added to ``places`` by kind."""
    if file.suffix != ".safetensors":
        size = file.stat().st_size
        for number in range(WINDOWS):
            opened.seek(size * number // WINDOWS)
            yield opened.read(WINDOW_BYTES)
        return
    length = int.from_bytes(opened.read(8), "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"{file.name} has a header of {length} bytes")
    header = opened.read(length)
    yield header
    for name, tensor in json.loads(header).items():
        if name != "__metadata__":
            first, last = tensor["data_offsets"]
            places.setdefault(_NUMBER.sub("#", name), []).append((file, 8 + length + first, last - first))


def _samples(places: dict[str, list[tuple[Path, int, int]]]) -> Iterator[bytes]:
    """Bytes from the middle of evenly chosen tensors of each kind, each file opened once, in order of place."""
    chosen = sorted(place for _, found in sorted(places.items()) for place in _spread(found))
    opened: BinaryIO | None = None
    try:
        for file, offset, size in chosen:
            if opened is None or opened.name != str(file):
                if opened is not None:
                    opened.close()
                opened = file.open("rb", buffering=0)
            opened.seek(offset + max(0, size - SAMPLE_BYTES) // 2)
            yield opened.read(min(SAMPLE_BYTES, size))
    finally:
        if opened is not None:
            opened.close()


def _spread(found: Sequence[tuple[Path, int, int]]) -> Iterator[tuple[Path, int, int]]:
    count = min(len(found), SAMPLES_A_KIND)
    return (found[len(found) * number // count] for number in range(count))
