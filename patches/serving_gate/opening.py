"""Opening the gate: the first API server runs the smoke tests, the others wait for their verdict."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from anyio import fail_after

from patches.framework import log, rundir, settings
from patches.framework.errors import EXIT_SMOKE_FAILED
from patches.framework.selection import selected
from patches.kv_probe import WHOLE
from patches.serving_gate import phases
from patches.serving_gate.gate import Gate
from patches.serving_gate.metrics import publish
from patches.serving_gate.plan import CheckResult, SmokePlan, Verdict
from patches.serving_gate.planning import PROBE_PATCH, make_plan
from patches.serving_gate.side_door import NOT_THE_PORT, needed, side_door
from patches.supervision import SUPERVISOR_PID

__all__ = ["Opening"]

_POLL_S = 0.1
_GRACE_S = 5.0


class Opening:
    """Brings one API server's gate from the smoke tests to serving, or the server to its end."""

    def __init__(self, gate: Gate, app: Any, sock: socket.socket | None, run_dir: Path) -> None:
        self._gate = gate
        self._app = app
        self._config = app.state.engine_client.vllm_config
        self._sock = sock
        self._enforcing = settings.get("SPLINT_MODE") == "enforce"
        self._level = settings.get("SPLINT_SMOKE")
        self._run_dir = run_dir

    @property
    def _first(self) -> bool:
        return int(self._config.parallel_config._api_process_rank) <= 0

    async def run(self) -> None:
        """Wait until the server listens, get the verdict, and act on it."""
        if self._first:
            self._note("smoke", "up and closed: the smoke tests begin when the port is open")
        await self._listening()
        verdict = await (self._test() if self._first else self._await_verdict())
        publish(verdict, self._run_dir)
        if verdict.status == "failed" and self._enforcing:
            self._fail(verdict)
        else:
            await self._serve(verdict)

    async def _listening(self) -> None:
        while not getattr(getattr(self._app.state, "server", None), "started", False):  # noqa: ASYNC110 - vLLM's own flag
            await asyncio.sleep(_POLL_S)

    async def _test(self) -> Verdict:
        plan = make_plan(self._app.state.args, self._config, self._port(), self._run_dir)
        if self._level == "off":
            verdict = _own_verdict("skipped", plan, "the smoke tests are turned off by SPLINT_SMOKE=off")
        else:
            verdict = await self._run_through(plan)
        rundir.write_json(self._run_dir / rundir.VERDICT, verdict.to_json())
        (self._run_dir / rundir.SMOKE_PLAN).unlink(missing_ok=True)
        return verdict

    def _port(self) -> int:
        """The port that was bound: with ``--port 0`` it is the kernel's choice."""
        if self._sock is None or self._sock.family == socket.AF_UNIX:
            return int(self._app.state.args.port)
        return int(self._sock.getsockname()[1])

    async def _run_through(self, plan: SmokePlan) -> Verdict:
        """Through the port, or beside it where it demands a certificate that we do not have."""
        if not needed(self._app.state.args):
            return await self._run_battery(plan)
        async with side_door(self._app, plan, self._run_dir) as beside:
            verdict = await self._run_battery(beside)
        return replace(verdict, checks=(*verdict.checks, NOT_THE_PORT))

    async def _run_battery(self, plan: SmokePlan) -> Verdict:
        plan_file, found = self._run_dir / rundir.SMOKE_PLAN, self._run_dir / "battery.json"
        found.unlink(missing_ok=True)
        rundir.write_json(plan_file, plan.to_json())
        command = (sys.executable, "-P", "-m", "entrypoint.smoke", str(plan_file), str(found))
        battery = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
        try:
            with fail_after(plan.timeout_s + _GRACE_S):
                code = await battery.wait()
        except TimeoutError:
            battery.kill()
            return _own_verdict("failed", plan, f"the smoke tests did not end within {plan.timeout_s:g} s")
        finally:
            with suppress(ProcessLookupError):
                battery.kill()
        data = rundir.read_json(found)
        if data is None:
            return _own_verdict("failed", plan, f"the smoke tests ended with code {code} and left no verdict")
        return Verdict.from_json(data)

    async def _await_verdict(self) -> Verdict:
        while (data := rundir.read_json(self._run_dir / rundir.VERDICT)) is None:  # noqa: ASYNC110 - another process
            await asyncio.sleep(_POLL_S)
        return Verdict.from_json(data)

    async def _restore(self) -> None:
        """Smoke tests that broke off may have left the scheduler cutting prefills into blocks."""
        engines = self._app.state.engine_client.engine_core
        with fail_after(_GRACE_S):
            await engines.call_utility_all_async("splint_probe", WHOLE)

    async def _serve(self, verdict: Verdict) -> None:
        if self._first and verdict.status == "failed" and PROBE_PATCH in selected(settings.get("SPLINT_PATCHES")):
            await self._restore()
        self._gate.enter("opening")
        if self._first:
            await self._until(self._others_hold)
            passed = sum(check.status == "passed" for check in verdict.checks)
            message = f"smoke tests {verdict.status}, {passed} checks passed in {verdict.seconds:.1f} s"
            self._note("serving", f"open for traffic: {message}", verdict=verdict.status, checks_passed=passed)
        else:
            (self._run_dir / f"{rundir.HOLDS}{os.getpid()}").touch()
            await self._until(self._first_serves)
        self._gate.enter("serving")

    def _others_hold(self) -> bool:
        """Whether every other API server holds its requests: only then may one of them be let in."""
        others = int(self._config.parallel_config._api_process_count) - 1
        return len(list(self._run_dir.glob(f"{rundir.HOLDS}*"))) >= others

    def _first_serves(self) -> bool:
        return (rundir.read_json(self._run_dir / rundir.PHASE) or {}).get("phase") == "serving"

    async def _until(self, true: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + _GRACE_S
        while not true() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - other processes' files
            await asyncio.sleep(_POLL_S / 2)

    def _fail(self, verdict: Verdict) -> None:
        self._gate.enter("failed")
        if not self._first:
            return
        failed = [check for check in verdict.checks if check.status == "failed"]
        for check in failed:
            log.tell("smoke", f"smoke test {check.id} FAILED: {check.reason}", check=check.id, status=check.status)
        message = f"not serving: the smoke tests failed; ending with exit code {EXIT_SMOKE_FAILED}"
        self._note("failed", message, verdict=verdict.status, checks_failed=[check.id for check in failed])
        if os.environ.get(SUPERVISOR_PID) is None:
            self._app.state.engine_client.shutdown(timeout=0)
            os._exit(EXIT_SMOKE_FAILED)

    def _note(self, phase: str, message: str, **facts: Any) -> None:
        phases.note(self._run_dir, phase, self._config.shutdown_timeout, message, **facts)


def _own_verdict(status: str, plan: SmokePlan, reason: str) -> Verdict:
    check = CheckResult("battery", "the smoke tests run to their end", status, 0.0, reason)
    return Verdict(status, plan.level, 0.0, phases.now(), (check,))
