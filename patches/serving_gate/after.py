"""What follows the opening: watching what was proven, telling it, and the drain at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from patches.framework import log, rundir, settings
from patches.serving_gate import canary, phases
from patches.serving_gate.drain import ATTRIBUTE, Drain
from patches.serving_gate.gate import Gate
from patches.serving_gate.peers import peers_of
from patches.serving_gate.readiness import Members, Readiness, look_after
from patches.serving_gate.registering import register
from patches.serving_gate.state_metrics import StateCollector

__all__ = ["After"]


class After:
    """Watches over one API server once its gate is open.

    Args:
        gate: The API server's gate.
        app: Its application.
        run_dir: The server's run directory.
    """

    def __init__(self, gate: Gate, app: Any, run_dir: Path) -> None:
        self._gate = gate
        self._app = app
        self._engine = app.state.engine_client
        self._run_dir = run_dir
        self.readiness = Readiness(self._tell)
        setattr(self._engine, ATTRIBUTE, Drain(gate, app, self._note_drain))

    async def run(self) -> None:
        """Look after the server until it ends; returns at once where the gate did not open.

        Where the watch itself breaks, the server is unready from then on: nobody would see what becomes of it.
        """
        if self._gate.phase != "serving":
            return
        try:
            register(StateCollector(self._run_dir, self.is_ready))
            await asyncio.gather(look_after(self.readiness, self._looks()), self._fly())
        except Exception as error:
            self.readiness.put("watch", f"the watch over this server has ended ({type(error).__name__}: {error})")
            raise

    def is_ready(self) -> bool:
        """Whether this API server is to get requests."""
        return self._gate.open and not self.readiness.reasons

    async def _fly(self) -> None:
        """The canary of the whole server is the first API server's."""
        config = self._engine.vllm_config
        if canary.wanted(config) and config.parallel_config._api_process_rank <= 0:
            idle_s = settings.get(canary.SETTING)
            await canary.Canary(canary.Question.of(self._app), self._is_busy, self._run_dir, idle_s).run()

    def _is_busy(self) -> bool:
        return bool(self._engine.get_num_unfinished_requests())

    def _looks(self) -> dict[str, Callable[[], str | None]]:
        looks = {"engine": self._look_at_engine, "processes": Members.of(self._run_dir).look}
        if canary.wanted(self._engine.vllm_config):
            looks["canary"] = partial(canary.look_at, self._run_dir)
        peers = peers_of(self._engine)
        return looks if peers is None else {**looks, "other nodes": peers.look}

    def _look_at_engine(self) -> str | None:
        return "the engine has died" if self._engine.errored else None

    def _tell(self, source: str, reason: str | None) -> None:
        if self._gate.phase != "serving":
            return
        log.tell("readiness", f"not ready: {reason}" if reason else f"ready again: {source}", source=source)
        if source == "other nodes" and reason:
            self._end(reason)

    def _end(self, reason: str) -> None:
        """A rank of the group is lost for good: end as for one of this node, by the supervisor where there is one."""
        rundir.write_json(self._run_dir / rundir.LOST, {"what": reason})
        self._app.state.server.should_exit = True

    def _note_drain(self) -> None:
        in_flight = len(self._app.state.server.server_state.tasks)
        drain_s = self._engine.vllm_config.shutdown_timeout
        message = f"draining: {in_flight} requests in flight get up to {drain_s:g} s, new ones are refused"
        phases.note(self._run_dir, "draining", drain_s, message, in_flight=in_flight)
