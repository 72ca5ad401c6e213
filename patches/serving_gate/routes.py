"""What the server says about itself once it is open: ``/livez``, ``/readyz``, ``/startupz``, ``/splint/report``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from patches.framework import rundir
from patches.framework.report import report
from patches.serving_gate.gate import Gate
from patches.serving_gate.readiness import Readiness

__all__ = ["add_routes"]


def add_routes(app: Any, gate: Gate, readiness: Readiness, run_dir: Path) -> None:
    """Add the routes to the server's application."""
    engine = app.state.engine_client

    def healthy() -> bool:
        return engine is None or not engine.errored

    async def live(_: Request) -> Response:
        return JSONResponse(gate.state(), 200 if healthy() else 503)

    async def ready(_: Request) -> Response:
        """Ready once all API servers are open, and while none of what was proven at the opening is known to be gone."""
        phase = (rundir.read_json(run_dir / rundir.PHASE) or gate.state())["phase"] if healthy() else "engine dead"
        phase = gate.phase if phase == "serving" else phase
        reasons = readiness.reasons
        status = 200 if phase == "serving" and not reasons else 503
        return JSONResponse(gate.state() | {"phase": phase, "reasons": reasons}, status)

    async def started(_: Request) -> Response:
        return JSONResponse(gate.state())

    async def show(_: Request) -> Response:
        return JSONResponse({**report(run_dir), **gate.state()})

    routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/livez": live,
        "/readyz": ready,
        "/startupz": started,
        "/splint/report": show,
    }
    for path, endpoint in routes.items():
        app.router.add_route(path, endpoint, methods=["GET"], include_in_schema=False)
