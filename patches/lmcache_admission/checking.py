"""What came back from a tier, held against its seal and, in files, against its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from patches.lmcache_admission.batches import Batch
from patches.lmcache_admission.seal import difference

__all__ = ["GONE", "KEPT", "NOT_LOADED", "refused"]

GONE = "gone"
NOT_LOADED = "not_loaded"
PathOf = Callable[[Any], Path]
KEPT = "other_version"
"""Objects of another release of vllm-splint are misses, and are left alone: two releases on one store would else
delete each other's."""


def refused(batch: Batch, loaded: Any, path_of: PathOf | None) -> Iterator[tuple[int, str]]:
    """Which objects of a batch must not be used.

    Args:
        batch: As it was handed to the tier.
        loaded: The tier's own bitmap: what it says it has loaded.
        path_of: From a key to its file, for tiers that are folders.

    Yields:
        Place in the batch, and why.
    """
    for place, (key, view) in enumerate(zip(batch.keys, batch.views, strict=True)):
        size = _size(path_of(key)) if path_of else view.get_size()
        if size is None:
            yield place, GONE
        elif size != view.get_size():
            yield place, "wrong_size"
        elif not loaded.test(place):
            yield place, NOT_LOADED
        elif (reason := difference(view.expected(), view.found())) is not None:
            yield place, reason


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
