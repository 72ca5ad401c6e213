"""The scheduler's look-ups: one that is not sent, because the server is away, is a miss like any other."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework import tallies
from patches.framework.records import Seam

__all__ = ["maybe_submit_lookup_request"]

_LAST = "splint_last_unsent"


def maybe_submit_lookup_request(seam: Seam) -> Callable[..., None]:
    """Count a request whose prompt is computed without a look-up; the scheduler may ask for it again and again."""
    original = seam.original

    @wraps(original)
    def submit(self: Any, request_id: str, *args: Any, **kwargs: Any) -> None:
        seam.count()
        if not self.is_healthy and vars(self).get(_LAST) != request_id:
            setattr(self, _LAST, request_id)
            tallies.miss("server_away", "server", "no LMCache server answers; prompts are computed")
        original(self, request_id, *args, **kwargs)

    return submit
