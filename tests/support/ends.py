"""What a server may leave behind."""

from __future__ import annotations

from pathlib import Path

__all__ = ["abandoned_segments"]

SHARED_MEMORY = Path("/dev/shm")


def abandoned_segments() -> set[str]:
    """Shared-memory segments that no living process maps: other servers of this machine may be at work."""
    before = _present()
    held = {segment for maps in Path("/proc").glob("[0-9]*/maps") for segment in _mapped(maps)}
    return (before & _present()) - held


def _present() -> set[str]:
    return {str(path) for path in SHARED_MEMORY.iterdir()}


def _mapped(maps: Path) -> set[str]:
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
