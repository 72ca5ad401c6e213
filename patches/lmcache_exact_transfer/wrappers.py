"""A worker's side of a transfer, held against the layout that it has registered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from patches.framework import tallies
from patches.framework.errors import MismatchError
from patches.framework.records import Seam

__all__ = ["commit_store", "prepare_retrieve", "prepare_store", "submit_store"]

logger = logging.getLogger(__name__)

TIER = "server"


def prepare_retrieve(seam: Seam) -> Callable[..., Any]:
    """Chunks that are not this worker's are given back unread: the load has failed and is computed."""
    original = seam.original

    @wraps(original)
    def prepared(self: Any, key: Any, instance_id: int) -> Any:
        seam.count()
        chunks = original(self, key, instance_id)
        difference = _difference(self.layout_desc, chunks or ())
        if difference is None:
            return chunks
        tallies.miss("wrong_layout", TIER, difference)
        self.commit_retrieve(key, instance_id)
        return None

    return prepared


def prepare_store(seam: Seam) -> Callable[..., Any]:
    """Slots that are not this worker's are not written. Nobody can read them, and the server frees them in time.

    An answer without slots would say that all chunks are there already, so this raises.
    """
    original = seam.original

    @wraps(original)
    def prepared(self: Any, key: Any, instance_id: int) -> Any:
        seam.count()
        found = original(self, key, instance_id)
        difference = None if found is None else _difference(self.layout_desc, found[0])
        if difference is not None:
            raise MismatchError(
                f"room in the LMCache server for {difference}",
                "room for this worker's own chunks",
                "Start an LMCache server for this engine alone.",
            )
        return found

    return prepared


def submit_store(seam: Seam) -> Callable[..., Any]:
    """A store for which there is no room is a failed one, as it is where LMCache stores in the background."""
    original = seam.original

    @wraps(original)
    def submitted(self: Any, *args: Any, **kwargs: Any) -> Any:
        from lmcache.v1.multiprocess.futures import MessagingFuture

        seam.count()
        try:
            return original(self, *args, **kwargs)
        except MismatchError as error:
            logger.warning("Nothing was stored in LMCache: %s", error)
        future: Any = MessagingFuture()
        future.set_result(False)
        return future

    return submitted


def commit_store(seam: Seam) -> Callable[..., bool]:
    """Chunks that are not what this worker has registered are not sent."""
    original = seam.original

    @wraps(original)
    def committed(self: Any, key: Any, instance_id: int, chunks: list[Any]) -> bool:
        seam.count()
        difference = _difference(self.layout_desc, chunks)
        if difference is None:
            return bool(original(self, key, instance_id, chunks))
        logger.error("Nothing was stored in LMCache: %s", difference)
        return False

    return committed


def _difference(layout: Any, chunks: Iterable[Any]) -> str | None:
    """What tells the chunks from the registered layout, in words, or None."""
    shape, dtype = layout.shapes[0], layout.dtypes[0]
    for chunk in chunks:
        if chunk.dtype != dtype or chunk.shape != shape:
            return f"a chunk of {chunk.dtype} {list(chunk.shape)}; this worker has {dtype} {list(shape)}"
    return None
