"""An object on its way through a client of our own: each piece is summed while the processor has it in its cache.

A sum over the whole object, before it is written or after it was read, fetches every byte from memory once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from patches.lmcache_admission.room import Sealed
from patches.lmcache_admission.seal import crc32c

__all__ = ["PIECE_BYTES", "Streamed", "incoming", "outgoing"]

PIECE_BYTES = 512 << 10
"""Stays in a core's second cache (1 to 2 MiB), and is worth two calls."""


class Streamed(Sealed):
    """A sealed object that is read or written in order, piece by piece.

    LMCache hands what :attr:`byte_array` gives to its client unseen, but for the length.

    Args:
        key: LMCache's key of the object.
        inner: LMCache's ``TensorMemoryObj``, with room.
        aligned: Whether the tier needs whole slots (``O_DIRECT``). Such an object is one piece: the disk wants to be
            asked for much at once, and does not bring it through the processor's cache.
    """

    def __init__(self, key: Any, inner: Any, *, aligned: bool = False) -> None:
        super().__init__(key, inner, aligned=aligned)
        self._piece = self._length if aligned else PIECE_BYTES

    def __len__(self) -> int:
        return self._length

    @property
    def byte_array(self) -> Any:
        """Itself, for the client."""
        return self

    def outgoing(self) -> Iterator[memoryview]:
        """What is to be written, in order; the last piece ends with the seal."""
        whole, size, running = self.memory(self._length), self.inner.get_size(), 0
        for first, end in self._bounds(size):
            running = crc32c(whole[first : min(end, size)], running)
            if end == self._length:
                self.sum = running
                self.seal()
            yield whole[first:end]

    def incoming(self) -> Iterator[memoryview]:
        """Memory to be filled, in order: each piece before the next is asked for."""
        whole, size, running = self.memory(self._length), self.inner.get_size(), 0
        self.sum = None
        for first, end in self._bounds(size):
            yield whole[first:end]
            running = crc32c(whole[first : min(end, size)], running)
        self.sum = running

    def _bounds(self, size: int) -> Iterator[tuple[int, int]]:
        """Of each piece: where it begins and ends. What is behind the object's own bytes goes with the last."""
        starts = range(0, size, self._piece)
        for first in starts:
            yield first, self._length if first == starts[-1] else first + self._piece


def outgoing(value: Any) -> Iterator[memoryview]:
    """What is to be written of anything that a client gets."""
    return value.outgoing() if isinstance(value, Streamed) else iter((memoryview(value).cast("B"),))


def incoming(target: Any) -> Iterator[memoryview]:
    """What is to be filled of anything that a client gets."""
    return target.incoming() if isinstance(target, Streamed) else iter((memoryview(target).cast("B"),))
