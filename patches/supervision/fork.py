"""The fork that puts a supervising parent above a server."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from patches.framework import log, rundir
from patches.framework.errors import EXIT_REFUSED, RunDirectoryError, SplintError
from patches.supervision import SUPERVISOR_PID, is_supervised, processes
from patches.supervision.command import is_headless, leaves_out
from patches.supervision.living import CACHE_SERVER, SUPERVISOR
from patches.supervision.members import read_object
from patches.supervision.parent import HANDLED, Supervisor

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

__all__ = ["supervise"]

_LOCK = "supervisor.lock"
_BATTERY = "battery.json"


def supervise() -> None:
    """Fork a server off this process; see :func:`patches.supervision.supervise`."""
    if sys.platform != "linux" or is_supervised(os.environ, os.getppid()):
        return
    try:
        folder, private = _run_directory()
        lock = _claim(folder)
    except (SplintError, OSError) as error:
        log.tell("refused", str(error))
        os._exit(EXIT_REFUSED)
    _fork(folder, lock, private=private)


def _run_directory() -> tuple[Path, bool]:
    """The run directory, and whether it was made here and so ends with the server.

    One that is inherited from another server's environment is that server's own, not a choice of the user.
    """
    named = rundir.current()
    if named is None or SUPERVISOR_PID in os.environ:
        return rundir.create(), True
    return rundir.prepare(named), False


def _claim(folder: Path) -> int:
    """Lock ``folder`` for this server and clear what an earlier one left. Returns the lock's descriptor.

    Raises:
        RunDirectoryError: another running server has it.
    """
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise RunDirectoryError(
            f"another running server uses the run directory {folder}",
            "one run directory a server",
            f"Set {rundir.ENV} to another folder, or unset it for a private one.",
        ) from None
    _clear(folder)
    return lock


def _clear(folder: Path) -> None:
    rundir.forget_opening(folder)
    told = (rundir.LOST, rundir.CANARY, rundir.SMOKE_PLAN, rundir.SMOKE_SO_FAR)
    left = [folder / name for name in (*told, _BATTERY, SUPERVISOR)]
    left += [path for name in (rundir.ROSTER, rundir.REFUSED) for path in (folder / name).iterdir()]
    kept = _cache_servers(folder / rundir.ROSTER)
    for path in left:
        if path.stem not in kept:
            path.unlink(missing_ok=True)


def _cache_servers(roster: Path) -> set[str]:
    """Pids of the LMCache servers that have attested here and are running: they may start before the engine."""
    return {path.stem for path in roster.glob("*.json") if _is_cache_server(path)}


def _is_cache_server(path: Path) -> bool:
    entry = read_object(path)
    state = processes.read_state(int(path.stem)) if path.stem.isdecimal() else None
    return entry.get("role") == CACHE_SERVER and state is not None and state.started == entry.get("start_time")


def _fork(folder: Path, lock: int, *, private: bool) -> None:
    # A signal that comes between the fork and the parent's handlers must wait for them; as PID 1 of a container
    # the parent would not be sent it at all, elsewhere it would die of it and leave the child.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    processes.adopt_orphans()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(lock)
        _become_server(parent, folder, previous)
    else:
        _become_parent(child, folder, previous, private=private)


def _become_server(parent: int, folder: Path, previous: Collection[int]) -> None:
    processes.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)
    os.environ[rundir.ENV] = str(folder)
    os.environ[SUPERVISOR_PID] = str(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _about(child: int) -> dict[str, Any]:
    """What others may know of this supervising parent; ``gated`` says whether the run directory will tell phases."""
    own = processes.read_state(os.getpid())
    return {
        "pid": os.getpid(),
        "started": own.started if own else None,
        "main_pid": child,
        "since": time.time(),
        "gated": not (is_headless(sys.orig_argv) or leaves_out(os.environ.get("SPLINT_PATCHES", ""), "serving_gate")),
    }


def _become_parent(child: int, folder: Path, previous: Collection[int], *, private: bool) -> NoReturn:
    code = 1
    try:
        rundir.write_json(folder / SUPERVISOR, _about(child))
        code = Supervisor(child, folder, sys.orig_argv, previous).run()
    except Exception as error:  # noqa: BLE001 - whatever fails here, no server must go on without its supervisor
        log.tell("failed", f"the supervising parent failed ({type(error).__name__}: {error}); ending the server")
        for pid in (child, *processes.descendants(os.getpid())):
            processes.send(pid, signal.SIGKILL)
    finally:
        if private:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(code)
