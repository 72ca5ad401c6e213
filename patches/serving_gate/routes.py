"""What the server says about itself once it is open: ``/livez``, ``/readyz``, ``/startupz``, ``/splint/report``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import patches
from patches.framework import roster, rundir, settings
from patches.framework.libraries import DISTRIBUTIONS, installed_version
from patches.serving_gate.gate import Gate

__all__ = ["REPORT_SCHEMA", "add_routes", "report"]

REPORT_SCHEMA = 1


def report(gate: Gate, run_dir: Path) -> dict[str, Any]:
    """Everything that is known about patches, processes and the verdict. Linear in processes."""
    processes = roster.load(run_dir)
    return {
        "schema": REPORT_SCHEMA,
        **gate.state(),
        "version": patches.__version__,
        "mode": settings.get("SPLINT_MODE"),
        "libraries": {library: installed_version(library) for library in DISTRIBUTIONS},
        "patches": [_patch(patch, processes) for patch in patches.catalogue()],
        "processes": processes,
        "verdict": rundir.read_json(run_dir / rundir.VERDICT),
        "timings_ms": _timings(processes),
    }


def _patch(patch: Any, processes: list[dict[str, Any]]) -> dict[str, Any]:
    """A patch's record, its states over the processes, and the calls that its seams took."""
    states = [found for entry in processes for found in entry["patches"] if found["id"] == patch.id]
    names = {target.name for target in patch.targets}
    return {
        "id": patch.id,
        "purpose": patch.purpose,
        "library": patch.library,
        "releases": patch.releases,
        "upstream": list(patch.upstream),
        "retires": patch.retires,
        "states": {found["state"]: found["reason"] for found in states},
        "calls": sum(count for entry in processes for seam, count in entry["calls"].items() if seam in names),
    }


def _timings(processes: list[dict[str, Any]]) -> dict[str, float]:
    """Start-up work of our own, summed over all processes, in milliseconds a phase."""
    total: dict[str, float] = {}
    for entry in processes:
        for phase, spent in entry["timings_ms"].items():
            total[phase] = round(total.get(phase, 0.0) + spent, 3)
    return total


def add_routes(app: Any, gate: Gate, run_dir: Path) -> None:
    """Add the routes to the server's application."""
    engine = app.state.engine_client

    def healthy() -> bool:
        return engine is None or not engine.errored

    async def live(_: Request) -> Response:
        return JSONResponse(gate.state(), 200 if healthy() else 503)

    async def ready(_: Request) -> Response:
        phase = (rundir.read_json(run_dir / rundir.PHASE) or gate.state())["phase"] if healthy() else "engine dead"
        return JSONResponse(gate.state() | {"phase": phase}, 200 if phase == "serving" else 503)

    async def started(_: Request) -> Response:
        return JSONResponse(gate.state())

    async def show(_: Request) -> Response:
        return JSONResponse(report(gate, run_dir))

    routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/livez": live,
        "/readyz": ready,
        "/startupz": started,
        "/splint/report": show,
    }
    for path, endpoint in routes.items():
        app.router.add_route(path, endpoint, methods=["GET"], include_in_schema=False)
