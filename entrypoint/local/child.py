"""A child process that never outlives us."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from anyio import fail_after

__all__ = ["Child"]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """Runs in the child before its program: the kernel sends SIGTERM when we are gone, however we went."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One program with a session of its own, so that Ctrl-C reaches us alone and we end things in order.

    Attributes:
        name: For messages.
        log: Where its output goes; None for our own output.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path | None) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    async def start(cls, name: str, command: Sequence[str], env: dict[str, str], log: Path | None = None) -> Child:
        """Start ``command``.

        Raises:
            OSError: there is no such program.
        """
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("wb")) if log else None
            process = await asyncio.create_subprocess_exec(
                *command,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        return cls(name, process, log)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait for its end; returns the exit code as a shell would give it."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        if self.log is None:
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, wait ``grace_s`` seconds, then kill it and every process of its session's group."""
        if self.running:
            self._process.terminate()
            try:
                with fail_after(grace_s):
                    await self._process.wait()
            except TimeoutError:
                print(f"{self.name} did not end within {grace_s:.0f} s and is killed", file=sys.stderr, flush=True)
        self.kill()
        await self._process.wait()

    def kill(self) -> None:
        """Kill what is left of it and its descendants."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
