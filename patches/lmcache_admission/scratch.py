"""Where a tier that is a folder writes before it renames: a place of its own for each server, and no file twice."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path

__all__ = ["flush", "make", "remove"]

_PARENT = ".splint"


def make(base: Path, below: str = "") -> str:
    """Make a folder for temporary files, and remove those of servers of this host that have ended.

    Args:
        base: The tier's folder; files are renamed from the one into the other, so both are in one file system.
        below: The operator's own folder for temporary files, relative to ``base``.

    Returns:
        The new folder, relative to ``base``.

    Raises:
        OSError: it can't be made.
    """
    parent = base / below / _PARENT
    parent.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    for found in parent.glob(f"{host}+*"):
        if not _alive(found.name.split("+")[1]):
            shutil.rmtree(found, ignore_errors=True)
    own = parent / f"{host}+{os.getpid()}+{uuid.uuid4().hex[:12]}"
    own.mkdir()
    return str(own.relative_to(base))


def remove(folder: Path) -> None:
    """Remove the folder and what a write that failed has left in it."""
    shutil.rmtree(folder, ignore_errors=True)


def flush(files: Sequence[Path]) -> None:
    """Have files, and their names, on the disk when this returns.

    Raises:
        OSError: the disk says that they are not. A file that is gone again is none of its troubles.
    """
    for path in [*files, *{file.parent for file in files}]:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _alive(pid: str) -> bool:
    return pid.isdecimal() and Path(f"/proc/{pid}").exists()
