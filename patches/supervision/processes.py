"""Processes as Linux shows them: who descends from whom, how one ended, and the few calls that Python lacks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ProcessState",
    "adopt_orphans",
    "descendants",
    "describe_status",
    "die_with_parent",
    "exit_code_of",
    "is_descendant",
    "is_resource_tracker",
    "name_process",
    "open_pidfd",
    "read_state",
    "send",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_DEEPEST = 64

# Positions in /proc/<pid>/stat, counted from the field after the command name; proc(5) numbers them 3, 4, 22 and 52.
_STATE, _PARENT, _STARTED, _EXIT_CODE = 0, 1, 19, 49


@dataclass(frozen=True)
class ProcessState:
    """One line of ``/proc/<pid>/stat``; ``status`` is a wait status, None while the process runs.

    ``started`` is in clock ticks after boot: with the pid it names the process for ever.
    """

    pid: int
    parent: int
    started: int
    ended: bool
    status: int | None


def read_state(pid: int) -> ProcessState | None:
    """The state of ``pid``, or None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None
    ended = fields[_STATE] in (b"Z", b"X")
    status = int(fields[_EXIT_CODE]) if ended else None
    return ProcessState(pid, int(fields[_PARENT]), int(fields[_STARTED]), ended, status)


def _all_states() -> list[ProcessState]:
    states = (read_state(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [state for state in states if state]


def descendants(root: int) -> list[int]:
    """The running descendants of ``root``, parents before children. One pass over ``/proc``."""
    children: dict[int, list[ProcessState]] = {}
    for state in _all_states():
        children.setdefault(state.parent, []).append(state)
    found: list[ProcessState] = list(children.get(root, ()))
    for state in found:
        found.extend(children.get(state.pid, ()))
    return [state.pid for state in found if not state.ended]


def is_descendant(pid: int, root: int) -> bool:
    """Whether ``root`` is among the ancestors of ``pid``."""
    for _ in range(_DEEPEST):
        state = read_state(pid)
        if state is None:
            return False
        if state.parent == root:
            return True
        pid = state.parent
    return False


def is_resource_tracker(pid: int) -> bool:
    """Whether ``pid`` is the process of Python's multiprocessing that unlinks shared memory once its users are gone."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def send(pid: int, number: int) -> None:
    """Send signal ``number`` to ``pid``, which may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when ``pid`` ends, or None where the kernel or a sandbox has none to give.

    Raises:
        ProcessLookupError: there is no such process.
    """
    opener = getattr(os, "pidfd_open", None)
    if opener is None:
        return None
    try:
        descriptor: int = opener(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None
    return descriptor


def exit_code_of(status: int) -> int:
    """A wait status as a shell tells it: the exit code, or 128 plus the signal's number."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def describe_status(status: int | None) -> str:
    """How a process with this wait status ended, in words."""
    if status is None:
        return "how is unknown"
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"killed by {_signal_name(-code)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int) -> None:
    """Have the kernel send signal ``number`` to this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def name_process(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show, of at most 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def _prctl(option: int, argument: int | ctypes.c_char_p) -> None:
    value = ctypes.c_ulong(argument) if isinstance(argument, int) else argument
    ctypes.CDLL(None, use_errno=True).prctl(option, value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
