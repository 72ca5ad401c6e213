"""The parent's loop: forward signals, watch the server's processes, and end the server as its orchestrator expects."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from typing import TYPE_CHECKING

from patches.framework import log, rundir
from patches.supervision import DRAIN_S, processes
from patches.supervision.clearing import clear_away
from patches.supervision.command import drain_seconds, is_headless, leaves_out
from patches.supervision.members import Death, Refusal, Roster, read_object, read_refusals
from patches.supervision.outcome import Course, End, Outcome, exit_code, patience

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path
    from types import FrameType

__all__ = ["HANDLED", "Supervisor"]

STOPS = frozenset({signal.SIGTERM, signal.SIGINT})
PASSED_ON = frozenset({signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2})
HANDLED = STOPS | PASSED_ON | {signal.SIGCHLD}

_LOOK_EVERY_S = 1.0
_ORPHANS_S = 1.0
_SERVING_PHASES = frozenset({"serving", "draining"})
# `timeout`, `tini -g` and a terminal send one request to the process and again to its group.
_SAME_REQUEST_S = 1.0


class Supervisor:
    """Watches one server from its fork to the last of its processes.

    Args:
        main: Pid of vLLM's first process, a child of this one.
        folder: The run directory.
        argv: The server's command line.
        mask: The signal mask to go on with once the handlers stand.
    """

    def __init__(self, main: int, folder: Path, argv: Sequence[str], mask: Collection[int]) -> None:
        self._main = main
        self._folder = folder
        self._argv = argv
        self._selector = selectors.DefaultSelector()
        self._roster = Roster(folder, os.getpid(), main, self._selector)
        self._course = Course()
        self._outcome = Outcome()
        self._refusals: list[Refusal] = []
        self._reaped: dict[int, int] = {}
        self._enforcing = os.environ.get("SPLINT_MODE") != "report"
        self._asked_at: float | None = None
        self._wake = _handle_signals(mask)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def run(self) -> int:
        """Watch until the server has ended and nothing of it is left. Returns the exit code for the whole."""
        processes.name_process("splint")
        self._watch()
        status = self._reaped.get(self._main, signal.SIGKILL)
        self._outcome.main_code = processes.exit_code_of(status)
        self._look()
        if os.WIFSIGNALED(status) and not self._course.begun:
            how = processes.describe_status(status)
            log.tell("died", f"vLLM's first process (pid {self._main}) ended unasked, {how}", member_pid=self._main)
        self._clear_away()
        self._tell_end()
        return exit_code(self._outcome)

    def _watch(self) -> None:
        look_at = 0.0
        while self._main not in self._reaped and not self._outcome.enforced:
            until = min(look_at, self._course.next_step) - time.monotonic()
            woken = self._selector.select(max(0.0, until))
            self._take_signals()
            self._reap()
            if woken or time.monotonic() >= look_at:
                self._look()
                look_at = time.monotonic() + _LOOK_EVERY_S
            self._take_steps()

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._wake.recv(4096):
                self._take_signal(signal.Signals(number))

    def _take_signal(self, number: signal.Signals) -> None:
        if number in STOPS:
            self._stop(number)
        elif number in PASSED_ON:
            processes.send(self._main, number)

    def _stop(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._asked_at is not None:
            if now - self._asked_at > _SAME_REQUEST_S:
                self._course.hurry(now)
            return
        self._asked_at = now
        if self._course.begun:
            return
        drain_s = self._drain_seconds()
        self._outcome.stop_signal = number
        self._outcome.served = drain_s is not None
        self._course.begin(now, patience(End.STOPPED, drain_s))

    def _drain_seconds(self) -> float | None:
        """Seconds for requests in flight; None where the server has not come to serve any."""
        told = read_object(self._folder / rundir.PHASE)
        if not told and (is_headless(self._argv) or _left_out("serving_gate")):
            return drain_seconds(self._argv, 0.0 if _left_out("graceful_drain") else DRAIN_S)
        if told.get("phase") not in _SERVING_PHASES:
            return None
        drain_s = told.get("drain_s")
        return float(drain_s) if isinstance(drain_s, (int, float)) else drain_seconds(self._argv)

    def _begin(self, end: End) -> None:
        self._course.begin(time.monotonic(), patience(end, None))

    def _look(self) -> None:
        """Take in what the server's processes left word of, and who of them ended."""
        deaths = self._roster.look()
        self._outcome.engine_seen = self._roster.engine_seen
        self._take_refusals()
        self._take_verdict()
        self._take_loss()
        for death in deaths:
            self._take_death(death)

    def _take_refusals(self) -> None:
        self._refusals = read_refusals(self._folder)
        if self._refusals:
            self._outcome.refused = True
            self._begin(End.REFUSED)

    def _take_verdict(self) -> None:
        if self._enforcing and read_object(self._folder / rundir.VERDICT).get("status") == "failed":
            self._outcome.smoke_failed = True
            self._begin(End.SMOKE_FAILED)

    def _take_death(self, death: Death) -> None:
        """The first one ends the server; those that follow are its consequence."""
        if self._course.begun:
            return
        status = self._reaped.get(death.member.pid, death.status)
        told = f"{death.member} ended unasked, {processes.describe_status(status)}"
        self._end_after(told, role=death.member.role, member_pid=death.member.pid)

    def _take_loss(self) -> None:
        """What an API server found lost on another node."""
        what = read_object(self._folder / rundir.LOST).get("what")
        if what and not self._course.begun:
            self._end_after(str(what))

    def _end_after(self, what: str, **facts: str | int) -> None:
        log.tell("died", f"{what}; ending the server", **facts)
        self._outcome.died = True
        self._begin(End.DIED)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._reaped[ended[0]] = ended[1]

    def _take_steps(self) -> None:
        now = time.monotonic()
        if self._course.term_due(now):
            processes.send(self._main, signal.SIGTERM)
        if self._course.kill_due(now) and self._main not in self._reaped:
            self._outcome.enforced = True

    def _clear_away(self) -> None:
        killed = clear_away(self._reap, by_themselves_s=0.0 if self._outcome.enforced else _ORPHANS_S)
        if killed:
            log.tell("killed", f"killed {len(killed)} processes that did not end by themselves", count=len(killed))

    def _tell_end(self) -> None:
        if self._outcome.stop_signal is not None:
            return
        if self._outcome.ended_unasked:
            log.tell("ended", "vLLM ended with exit code 0 although nobody asked it to; exit code 1")
        if self._outcome.smoke_failed:
            log.tell("ended", "ended because the smoke tests failed; their verdict stands above")
        for refusal in self._refusals:
            facts = {"found": refusal.found, "wanted": refusal.wanted, "remedy": refusal.remedy}
            log.tell("refused", f"refused to serve\n  {refusal}", **facts)


def _left_out(patch_id: str) -> bool:
    return leaves_out(os.environ.get("SPLINT_PATCHES", ""), patch_id)


def _handle_signals(mask: Collection[int]) -> socket.socket:
    """Have the number of every handled signal written to a socket, and let them come. Returns the end to read."""
    reader, writer = socket.socketpair()
    reader.settimeout(0)
    writer.settimeout(0)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for number in HANDLED:
        signal.signal(number, _noted)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return reader


def _noted(_number: int, _frame: FrameType | None) -> None:
    """The wake-up descriptor carries the number."""
