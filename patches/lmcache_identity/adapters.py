"""Which LoRA adapter: told by every byte that vLLM loads of it, so that a name or path used again is another one."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = ["adapter_identity", "loading"]

logger = logging.getLogger(__name__)

DIGITS = 16
_CONFIGURATION = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""What vLLM looks for in an adapter's folder, and nothing else."""

_PIECE = 1 << 20
_bound: dict[int, str | None] = {}
"""Number of an adapter to its identity, None once that can't be told. Nothing is ever taken out."""


class _File(NamedTuple):
    """A file as the file system tells it: when one of these changes, its bytes are read again."""

    path: str
    size: int
    modified: int
    changed: int
    inode: int


def adapter_identity(request: Any) -> str | None:
    """The identity of a request's adapter, 16 hex digits, or None where it can't be told: then nothing is cached.

    It is bound to the adapter's number when vLLM loads it, else when it is first used. Workers keep what they loaded
    under a number, and load it again where they had to drop it: as soon as the files hold other bytes, nobody can say
    which content a KV block comes from. The same holds for an adapter with ``load_inplace``, which is read each time.

    Args:
        request: vLLM's ``LoRARequest``.
    """
    number = request.lora_int_id
    if request.load_inplace or _bound.get(number, "") is None:
        return None
    found = _content(request)
    if found != _bound.setdefault(number, found):
        _untold(request, "its files, or another adapter's of that number, are not what was loaded")
    return _bound[number]


@contextmanager
def loading(request: Any) -> Iterator[None]:
    """Around vLLM's loading of an adapter: its number is bound to what the files hold, if it was the same all the time.

    Args:
        request: vLLM's ``LoRARequest``.
    """
    before = _files_or_none(request)
    yield
    if request.load_inplace:
        _untold(request, "it was loaded in place")
    elif before is not None and before != _files_or_none(request):
        _untold(request, "its files changed while it was loaded")
    else:
        adapter_identity(request)


def _untold(request: Any, reason: object) -> None:
    _bound[request.lora_int_id] = None
    logger.warning(
        "LoRA adapter %s (number %d, %s) can't be told from others, so its KV is not cached: %s",
        request.lora_name, request.lora_int_id, request.lora_path, reason,
    )  # fmt: skip


def _content(request: Any) -> str | None:
    """Digest of all that vLLM reads of the adapter, and of how it reads it."""
    whole = hashlib.sha256(b"3d" if getattr(request, "is_3d_lora_weight", False) else b"2d")
    try:
        for file in _files(request.lora_path):
            whole.update(b"\0" + os.path.basename(file.path).encode() + b"\0" + _digest(file))
    except OSError as error:
        _untold(request, error)
        return None
    return whole.hexdigest()[:DIGITS]


def _files_or_none(request: Any) -> tuple[_File, ...] | None:
    """The adapter's files; None where there are none (yet): vLLM gets those of a repository while it loads them."""
    try:
        return _files(request.lora_path)
    except OSError:
        return None


def _files(path: str) -> tuple[_File, ...]:
    """Configuration and weights. Raises OSError: one of them is not there or can't be looked at."""
    folder = _folder(path)
    weights = [file for name in _WEIGHTS if os.path.isfile(file := os.path.join(folder, name))]
    if not weights:
        raise FileNotFoundError(f"none of {', '.join(_WEIGHTS)} in {folder}")
    return tuple(_file(file) for file in (os.path.join(folder, _CONFIGURATION), *weights))


def _file(path: str) -> _File:
    found = os.stat(path)
    return _File(path, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


@lru_cache(maxsize=4096)
def _digest(file: _File) -> bytes:
    """SHA-256 of the whole file; it is read once for each state that the file system tells."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with open(file.path, "rb", buffering=0) as opened:
        while size := opened.readinto(piece):
            digest.update(piece[:size])
    return digest.digest()


def _folder(path: str) -> str:
    """The adapter's files: vLLM takes a folder, or a repository of the model hub, which its cache then holds."""
    folder = os.path.expanduser(path)
    if os.path.exists(folder):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(f"neither a folder nor a repository in the hub's cache: {path}") from error
