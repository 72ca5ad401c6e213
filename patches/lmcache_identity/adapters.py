"""Which LoRA adapter: told by the content of its files, so that a name that is used again names another one."""

from __future__ import annotations

import hashlib
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from patches.framework.errors import ProfileError
from patches.lmcache_identity.weights import weights_identity

__all__ = ["adapter_identity"]

logger = logging.getLogger(__name__)

DIGITS = 16
_CONFIGURATION = "adapter_config.json"


def adapter_identity(request: Any) -> str | None:
    """The identity of a request's adapter, 16 hex digits, or None where it can't be told: then nothing is cached.

    It is read when the adapter is first used under its number. vLLM reads the files of an adapter that was loaded
    with ``load_inplace`` again and again, so nobody can say which content a KV block came from.

    Args:
        request: vLLM's ``LoRARequest``.
    """
    if request.load_inplace:
        return None
    return _identity(request.lora_name, request.lora_int_id, request.lora_path)


@lru_cache(maxsize=4096)
def _identity(name: str, number: int, path: str) -> str | None:
    try:
        folder = _folder(path)
        content = weights_identity(str(folder))
        configuration = (folder / _CONFIGURATION).read_bytes()
    except (OSError, ProfileError) as error:
        logger.warning("LoRA adapter %s (%s) can't be told from others, so its KV is not cached: %s", name, path, error)
        return None
    return hashlib.sha256(content.encode() + b"\0" + configuration).hexdigest()[:DIGITS]


def _folder(path: str) -> Path:
    """The adapter's files: vLLM takes a folder, or a repository of the model hub, which its cache then holds."""
    folder = Path(path).expanduser()
    if folder.exists():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(f"neither a folder nor a repository in the hub's cache: {path}") from error
