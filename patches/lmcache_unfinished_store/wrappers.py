"""Unfinished stores are forgotten before the server would publish them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework.records import Seam

__all__ = ["release_entry"]

logger = logging.getLogger(__name__)


def release_entry(seam: Seam) -> Callable[..., None]:
    """Forget the instance's pending writes; their slots stay reserved until LMCache's own write limit (600 s).

    They are not freed at once: a worker that was only taken for dead may still be writing into them.
    """
    original = seam.original

    @wraps(original)
    def release(self: Any, instance_id: int, entry: Any) -> None:
        seam.count()
        unfinished = _forget_writes(self, instance_id)
        if unfinished:
            logger.warning(
                "Dropped %d unfinished store(s) of instance %d: their bytes were never confirmed.",
                unfinished,
                instance_id,
            )
        original(self, instance_id, entry)

    return release


def _forget_writes(module: Any, instance_id: int) -> int:
    with module._pending_shm_lock:
        unfinished = [key for key in module._pending_shm_writes if key[0] == instance_id]
        for key in unfinished:
            del module._pending_shm_writes[key]
    return len(unfinished)
