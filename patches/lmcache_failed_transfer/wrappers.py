"""The handlers of the LMCache server that touch an engine's blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework.records import Seam

__all__ = ["answered"]

logger = logging.getLogger(__name__)


def answered(seam: Seam) -> Callable[..., tuple[bytes, bool]]:
    """Answer every request: where the handler fails, with False, once nothing that it has begun runs any more.

    Where even that can't be told, the error passes and nobody is answered: the blocks stay reserved.
    """
    original = seam.original

    @wraps(original)
    def handle(self: Any, key: Any, instance_id: int, *args: Any, **kwargs: Any) -> tuple[bytes, bool]:
        seam.count()
        try:
            return original(self, key, instance_id, *args, **kwargs)  # type: ignore[no-any-return]
        except Exception:  # whatever it is, somebody waits for the answer
            logger.exception("A transfer for instance %d failed; it is answered as failed.", instance_id)
            entry = self.get_and_touch_context_entry(instance_id)
            if entry is not None:
                entry.cache_context.stream.synchronize()
            return b"", False

    return handle
