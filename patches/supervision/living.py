"""Which servers of this user live on this machine, by the run directories they keep."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from patches.framework import rundir
from patches.supervision import processes
from patches.supervision.members import WATCHED, read_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "CACHE_SERVER",
    "SUPERVISOR",
    "attested",
    "cache_server_folders",
    "ended_cache_server_folders",
    "has_cache_server",
    "is_alive",
    "is_living",
    "private_folders",
]

SUPERVISOR = "supervisor.json"
CACHE_SERVER = "lmcache_server"


def is_alive(pid: Any, started: Any) -> bool:
    """Whether process ``pid`` runs and is the one that started at ``started`` clock ticks after boot.

    The pid alone would not do: in a container the next server has the number of the last one.
    """
    if not isinstance(pid, int) or not isinstance(started, int):
        return False
    state = processes.read_state(pid)
    return state is not None and not state.ended and state.started == started


def attested(folder: Path) -> list[dict[str, Any]]:
    """The attestations in ``folder`` with ``alive`` added. One small file a process, nothing else is read."""
    entries = [read_object(path) for path in sorted((folder / rundir.ROSTER).glob("*.json"))]
    return [{**entry, "alive": is_alive(entry.get("pid"), entry.get("start_time"))} for entry in entries if entry]


def is_living(folder: Path) -> bool:
    """Whether the server of ``folder`` runs: its supervising parent or, where it has none, any of its processes."""
    supervisor = read_object(folder / SUPERVISOR)
    if supervisor:
        return is_alive(supervisor.get("pid"), supervisor.get("started"))
    return any(entry["alive"] and _is_server(entry) for entry in attested(folder))


def _is_server(entry: Mapping[str, Any]) -> bool:
    """An LMCache server that shares the folder comes before its engine and outlives it."""
    return entry.get("role") in WATCHED


def cache_server_folders() -> list[Path]:
    """The private run directories in which an LMCache server of this user lives, the last to change first."""
    living = filter(has_cache_server, _private())
    return sorted(living, key=lambda path: (path / rundir.ROSTER).stat().st_mtime, reverse=True)


def ended_cache_server_folders() -> list[Path]:
    """What LMCache servers of this user and host have left, none of which an engine shared.

    A web server that is told to end does so by the signal, so nothing is cleared away behind it.
    """
    return [path for path in _private() if _is_left(path, attested(path))]


def _is_left(folder: Path, entries: list[dict[str, Any]]) -> bool:
    marks = (folder / rundir.PHASE, folder / SUPERVISOR)
    theirs = {(entry.get("role"), entry.get("host"), entry["alive"]) for entry in entries}
    return theirs == {(CACHE_SERVER, socket.gethostname(), False)} and not any(mark.exists() for mark in marks)


def _private() -> set[Path]:
    """This user's run directories, in any order."""
    return {path for base in set(rundir.bases()) for path in base.glob(f"{rundir.PREFIX}*") if _is_ours(path)}


def has_cache_server(folder: Path) -> bool:
    """Whether an LMCache server lives that attests in ``folder``."""
    return any(entry["alive"] and entry.get("role") == CACHE_SERVER for entry in attested(folder))


def _is_ours(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.geteuid()
    except OSError:  # it ends while we look
        return False


def private_folders() -> list[Path]:
    """The run directories of this user's servers, newest first, those that a killed server left behind included."""
    dated = [(since, path) for path in _private() if (since := _since(path)) is not None]
    return [path for _, path in sorted(dated, reverse=True)]


def _since(folder: Path) -> float | None:
    """When the folder's server last wrote one of its two marks; None for a folder without one, or gone."""
    try:
        marks = [folder / name for name in (rundir.PHASE, SUPERVISOR)]
        return max((mark.stat().st_mtime for mark in marks if mark.exists()), default=None)
    except OSError:  # it ends while we look
        return None
