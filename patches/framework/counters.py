"""Call counters that other processes can read while they move.

Each process maps one small file of unsigned 64-bit integers; a call is one store into that memory.
Outside a server (no run directory) the counters live in anonymous memory.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["CAPACITY", "Counters", "read"]

CAPACITY = 512
_BYTES = CAPACITY * 8


class Counters:
    """The call counters of this process, one slot a seam."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._cells = memoryview(mmap.mmap(-1, _BYTES)).cast("Q")

    @property
    def names(self) -> tuple[str, ...]:
        """Seam names in slot order."""
        return tuple(self._names)

    def add(self, name: str) -> Callable[[], None]:
        """A function that counts one call of seam ``name``; the same seam keeps its slot.

        Raises:
            OverflowError: more than :data:`CAPACITY` seams.
        """
        if name not in self._names:
            if len(self._names) == CAPACITY:
                raise OverflowError(f"more than {CAPACITY} seams")
            self._names.append(name)
        slot = self._names.index(name)

        def count() -> None:
            self._cells[slot] += 1

        return count

    def increase(self, name: str, by: int) -> None:
        """Count ``by`` more for ``name``. Not for several threads at once.

        Raises:
            OverflowError: more than :data:`CAPACITY` names.
        """
        self.add(name)
        self._cells[self._names.index(name)] += by

    def share(self, path: Path) -> None:
        """Go on counting in the file at ``path``, from the numbers reached so far."""
        with open(path, "w+b") as file:
            file.truncate(_BYTES)
            cells = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("Q")
        cells[:] = self._cells
        self._cells = cells

    def reset(self) -> None:
        """Start from zero in memory of this process alone, as a forked child must."""
        self._cells = memoryview(mmap.mmap(-1, _BYTES)).cast("Q")

    def values(self) -> dict[str, int]:
        """Calls so far by seam name."""
        return {name: self._cells[slot] for slot, name in enumerate(self._names)}


def read(path: Path, names: tuple[str, ...]) -> dict[str, int]:
    """The counters in another process's file; a file that is not there (yet) reads as zero."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    data = data.ljust(_BYTES, b"\0")
    return {name: int.from_bytes(data[slot * 8 : slot * 8 + 8], sys.byteorder) for slot, name in enumerate(names)}
