"""The processes of one server, as they attested themselves, and what they left word of in the run directory."""

from __future__ import annotations

import json
import os
import select
import selectors
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patches.framework import rundir
from patches.supervision import processes

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Death", "Member", "Refusal", "Roster", "read_object", "read_refusals"]

WATCHED = frozenset({"api_server", "dp_coordinator", "engine_core", "worker"})
ENGINES = frozenset({"engine_core", "worker"})


@dataclass(frozen=True)
class Member:
    """One attested process of the server."""

    pid: int
    role: str
    dp_rank: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        ranks = ((" dp rank ", self.dp_rank), (" rank ", self.rank))
        named = ",".join(f"{label}{rank}" for label, rank in ranks if rank is not None)
        return f"{self.role}{named} (pid {self.pid})"


@dataclass(frozen=True)
class Death:
    """A member that ended, and its wait status where that could be seen before its parent collected it."""

    member: Member
    status: int | None


@dataclass(frozen=True)
class Refusal:
    """Why a process refused to serve: what it found, what it wanted, what to do."""

    found: str
    wanted: str
    remedy: str

    def __str__(self) -> str:
        return f"found: {self.found}\n  wanted: {self.wanted}\n  remedy: {self.remedy}"


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; empty where the file is absent, unreadable or holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_refusals(folder: Path) -> list[Refusal]:
    """The refusals left in ``folder``, each told once however many processes left it."""
    objects = [read_object(folder / rundir.REFUSED / name) for name in _json_files(folder / rundir.REFUSED)]
    told = [Refusal(*(str(entry.get(key, "unknown")) for key in ("found", "wanted", "remedy"))) for entry in objects]
    return list(dict.fromkeys(told))


def _json_files(folder: Path) -> list[str]:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    return sorted(name for name in names if name.endswith(".json") and not name.startswith("."))


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


class Roster:
    """Watches every attested process below ``root`` and tells which of them ended.

    Args:
        folder: The run directory.
        root: Pid above all processes of the server.
        main: Pid of vLLM's first process, which is not watched here.
        selector: Woken by the end of a watched process.
    """

    def __init__(self, folder: Path, root: int, main: int, selector: selectors.BaseSelector) -> None:
        self._folder = folder / rundir.ROSTER
        self._root = root
        self._selector = selector
        self._watched: dict[int, int | None] = {}
        self._settled = {f"{main}.json"}
        self.engine_seen = False

    def look(self) -> list[Death]:
        """Watch those that have attested since the last look, and return those that ended since."""
        gone = [Death(member, None) for member in self._newcomers() if not self._watch(member.pid)]
        return gone + [self._bury(pid) for pid in self._ended()]

    def _newcomers(self) -> list[Member]:
        news = [name for name in _json_files(self._folder) if name not in self._settled]
        return [member for name in news if (member := self._admit(name))]

    def _read(self, pid: int) -> Member:
        entry = read_object(self._folder / f"{pid}.json")
        return Member(pid, str(entry.get("role")), _number(entry.get("dp_rank")), _number(entry.get("rank")))

    def _admit(self, name: str) -> Member | None:
        """The member that ``name`` attests; None where its role is not (yet) one to watch, or it is not ours."""
        pid = name.removesuffix(".json")
        if not pid.isdigit():
            return None
        member = self._read(int(pid))
        if member.role not in WATCHED:
            return None
        self._settled.add(name)
        self.engine_seen = self.engine_seen or member.role in ENGINES
        if processes.is_descendant(member.pid, self._root):
            return member
        # Asked last: one that ended while its ancestors were looked up would be taken for somebody else's.
        return None if processes.read_state(member.pid) else member

    def _watch(self, pid: int) -> bool:
        """Watch ``pid``; False where it is gone already."""
        try:
            descriptor = processes.open_pidfd(pid)
        except ProcessLookupError:
            return False
        self._watched[pid] = descriptor
        if descriptor is not None:
            self._selector.register(descriptor, selectors.EVENT_READ)
        return True

    def _ended(self) -> list[int]:
        return [pid for pid, descriptor in self._watched.items() if _has_ended(pid, descriptor)]

    def _bury(self, pid: int) -> Death:
        """Watch ``pid`` no longer, and tell of its end."""
        state = processes.read_state(pid)
        descriptor = self._watched.pop(pid)
        if descriptor is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)
        return Death(self._read(pid), state.status if state else None)


def _has_ended(pid: int, descriptor: int | None) -> bool:
    """Whether the process ended. The descriptor, where there is one, is right even if the pid is in use again."""
    if descriptor is not None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    state = processes.read_state(pid)
    return state is None or state.ended
