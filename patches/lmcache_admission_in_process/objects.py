"""Room for a seal behind every object of the in-process connector's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from patches.framework.records import Seam
from patches.lmcache_admission.room import give_room, roomy

__all__ = ["allocate", "batched_allocate"]


def allocate(seam: Seam) -> Callable[..., Any]:
    """One object, with room."""
    original = seam.original

    @wraps(original)
    def allocated(self: Any, shapes: Any, dtypes: Any, fmt: Any = None, *args: Any, **kwargs: Any) -> Any:
        seam.count()
        if not _has_place(self, fmt):
            return original(self, shapes, dtypes, fmt, *args, **kwargs)
        groups, kinds = as_lists(shapes, dtypes)
        found = original(self, *roomy(groups, kinds), fmt, *args, **kwargs)
        if found is not None:
            give_room(found, groups, kinds)
        return found

    return allocated


def batched_allocate(seam: Seam) -> Callable[..., Any]:
    """Several objects of one layout, with room."""
    original = seam.original

    @wraps(original)
    def allocated(
        self: Any, shapes: Any, dtypes: Any, batch_size: int, fmt: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        seam.count()
        if not _has_place(self, fmt):
            return original(self, shapes, dtypes, batch_size, fmt, *args, **kwargs)
        groups, kinds = as_lists(shapes, dtypes)
        objects = original(self, *roomy(groups, kinds), batch_size, fmt, *args, **kwargs)
        for found in objects or ():
            give_room(found, groups, kinds)
        return objects

    return allocated


def as_lists(shapes: Any, dtypes: Any) -> tuple[list[Any], list[Any]]:
    """LMCache takes one shape and dtype, or a list of each."""
    import torch

    one = isinstance(shapes, torch.Size)
    return ([shapes] if one else list(shapes)), (list(dtypes) if isinstance(dtypes, Sequence) else [dtypes])


def _has_place(backend: Any, form: Any) -> bool:
    """Whether objects are of any size: the paged memory of PD and P2P has slots of one size."""
    from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator

    return isinstance(backend.memory_allocator, MixedMemoryAllocator) and (form is None or "BINARY" not in form.name)
