"""Programs in processes of their own, which can be killed at their time limit: a wedged device call can't be left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from entrypoint.checking import CheckFailedError

__all__ = ["output", "probe"]

_END_S = 5.0
_TAIL = 400
"""Characters of a failed program's last words that are shown."""


def probe(name: str, *words: str, limit_s: float, environ: dict[str, str], hint: str) -> dict[str, Any]:
    """Run a program of :mod:`entrypoint.preflight.probes` and return what its last line says, as JSON.

    Raises:
        CheckFailedError: it failed, or did not end in time and was killed.
    """
    command = (sys.executable, "-P", "-m", f"entrypoint.preflight.probes.{name}", *words)
    text = output(command, limit_s=limit_s, environ={**environ, "SPLINT_MODE": "off"}, hint=hint)
    try:
        found = json.loads(text.splitlines()[-1])
    except (IndexError, ValueError):
        raise CheckFailedError(f"no answer of the probe ({text[-_TAIL:]!r})", "its result", hint) from None
    return dict(found)


def output(command: tuple[str, ...], *, limit_s: float, environ: dict[str, str], hint: str) -> str:
    """The standard output of ``command``, which runs in a session of its own.

    Raises:
        CheckFailedError: it can't be started, failed, or did not end within ``limit_s`` seconds; then it is killed.
    """
    try:
        started = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise CheckFailedError(f"{command[0]}: {error.strerror}", "a program that can be started", hint) from error
    with started:
        try:
            said, complaint = started.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _kill(started)
            raise CheckFailedError(f"no end after {limit_s:g} s; killed", "a result in that time", hint) from None
    if started.returncode != 0:
        last = (complaint.strip() or said.strip())[-_TAIL:]
        raise CheckFailedError(f"exit code {started.returncode}: {last}", "a program that ends well", hint)
    return said


def _kill(started: subprocess.Popen[str]) -> None:
    """Kill the program and all that it started. What hangs in the driver dies when the driver lets it, not before."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    for pipe in (started.stdout, started.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.wait(_END_S)
