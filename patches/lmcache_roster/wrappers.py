"""The function in which the LMCache server starts, with its role noted on the way in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework import process
from patches.framework.records import Role, Seam
from patches.supervision import living

__all__ = ["run_cache_server"]


def run_cache_server(seam: Seam) -> Callable[..., Any]:
    """Note the role, prove the patches, then serve."""

    @wraps(seam.original)
    def start(*args: Any, **kwargs: Any) -> Any:
        seam.count()
        current = process.start()
        for left in living.ended_cache_server_folders():
            shutil.rmtree(left, ignore_errors=True)
        current.take_role(Role.LMCACHE_SERVER)
        current.verify_cache_server()
        started = seam.original(*args, **kwargs)
        current.alone = False
        return started

    return start
