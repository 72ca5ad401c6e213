"""How a task of LMCache's is cut: into batches that a tier works on while the next is sealed or the last is checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from patches.lmcache_admission.room import Sealed

__all__ = ["BATCH_BYTES", "Batch", "Task", "split"]

BATCH_BYTES = 8 << 20
"""Of one batch: at least one object, and no more than these bytes otherwise."""


@dataclass
class Task:
    """A task, and how many of its batches the tier still has.

    Attributes:
        number: By which LMCache asks for it.
        left: Batches that are not done.
        ok: Whether all batches that are done have been stored.
        stored_bytes: By them.
        loaded: LMCache's bitmap over the task's keys.
    """

    number: int
    left: int
    ok: bool = True
    stored_bytes: int = 0
    loaded: Any = None


@dataclass(frozen=True)
class Batch:
    """Keys and objects that are handed to the tier at once, from place ``first`` of the task on."""

    task: Task
    first: int
    keys: Sequence[Any]
    views: Sequence[Sealed]


def split(task: Task, keys: Sequence[Any], objects: Sequence[Any], *, aligned: bool, serde: bytes) -> list[Batch]:
    """Cut a task; ``task.left`` becomes the number of batches."""
    views = [Sealed(key, found, aligned=aligned, serde=serde) for key, found in zip(keys, objects, strict=True)]
    batches = [
        Batch(task, first, keys[first:end], views[first:end])
        for first, end in _cuts([view.get_size() for view in views])
    ]
    task.left = len(batches)
    return batches


def _cuts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = total = 0
    for place, size in enumerate(sizes):
        if place > first and total + size > BATCH_BYTES:
            yield first, place
            first, total = place, 0
        total += size
    if sizes:
        yield first, len(sizes)
