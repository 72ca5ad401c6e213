"""Test only: makes an LMCache server lose what it has found before it can be loaded.

Put this folder on ``PYTHONPATH`` and name a file in ``LOSE_LOADS``; while the file is there, the objects of every load
by the server (``lmcache_driven`` mode) are gone when the load begins, as if they had been evicted or had fallen ill.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import wrapt

WHILE = os.environ.get("LOSE_LOADS", "")


def _read(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if Path(WHILE).exists():
        deleted, _ = instance.delete_l1_keys(list(args[0]), force=True)
        print(f"lost {deleted} objects", file=sys.stderr, flush=True)
    return wrapped(*args, **kwargs)


if WHILE:
    wrapt.register_post_import_hook(
        lambda module: wrapt.wrap_function_wrapper(module, "StorageManager.unsafe_read", _read),
        "lmcache.v1.distributed.storage_manager",
    )
