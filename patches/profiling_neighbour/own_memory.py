"""What a process took of its device, from the three snapshots of a profile run. Bytes throughout."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Snapshot", "Taken", "taken"]


@dataclass(frozen=True)
class Snapshot:
    """A device at one moment.

    Attributes:
        free: Free memory.
        torch: What torch in this process holds, its reserve included.
        other: All the rest, whoever holds it: the CUDA context and NCCL of this process as well as its neighbours.
    """

    free: int
    torch: int
    other: int


@dataclass(frozen=True)
class Taken:
    """What this process took, by torch and outside of it; never less than what it can know."""

    torch: int
    other: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.torch + self.other


def taken(start: Snapshot, loaded: Snapshot, profiled: Snapshot, weights: int) -> Taken | None:
    """What this process took from ``start`` to ``profiled``, or None where the drop of free memory can be right.

    The drop can't be right where it is less than what torch alone took: somebody else gave memory back. torch's part is
    known then. Of the rest, the larger growth counts of that until the model was loaded and that until the end: a
    neighbour that only frees makes either smaller, one that also took memory makes the result larger, never smaller.

    Args:
        start: Before the model was loaded.
        loaded: After that, before the profile run.
        profiled: After the profile run.
        weights: What the model's weights take. Where torch holds less, they lie in an allocator that it does not count,
            as with sleep mode.
    """
    by_torch = profiled.torch - start.torch
    drop = start.free - profiled.free
    if drop >= max(by_torch, 0):
        return None
    if by_torch < weights:
        return Taken(weights, max(0, start.free - loaded.free - weights, drop - weights))
    return Taken(by_torch, max(0, loaded.other - start.other, profiled.other - start.other))
