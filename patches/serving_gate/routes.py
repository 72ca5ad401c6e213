"""What the server says about itself: ``/livez``, ``/readyz``, ``/startupz``, ``/splint/report``, and the web page.

The probes are for everybody and say no more than phase and reasons. The report, and so all that the page shows, needs
the API key where the server has one. While the gate is shut both are answered with status 503 and the same body.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from patches.framework import rundir
from patches.framework.redaction import Redaction, secrets_of
from patches.framework.report import report
from patches.serving_gate.access import Access, api_keys
from patches.serving_gate.gate import Gate
from patches.serving_gate.page import page
from patches.serving_gate.phases import now
from patches.serving_gate.readiness import Readiness

__all__ = ["add_routes"]

_NO_STORE = {"cache-control": "no-store"}
_NEEDS_KEY = {"www-authenticate": "Bearer"}


def add_routes(app: Any, gate: Gate, readiness: Readiness, run_dir: Path) -> None:
    """Add the routes to the server's application."""
    shown = _Shown(app, gate, readiness, run_dir)
    routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/livez": shown.live,
        "/readyz": shown.ready,
        "/startupz": shown.started,
        "/splint/report": shown.report,
        "/splint/": shown.page,
        "/splint": shown.page_without_slash,
    }
    for path, endpoint in routes.items():
        app.router.add_route(path, endpoint, methods=["GET"], include_in_schema=False)


class _Shown:
    """The answers of one API server."""

    def __init__(self, app: Any, gate: Gate, readiness: Readiness, run_dir: Path) -> None:
        self._engine = app.state.engine_client
        self._gate = gate
        self._readiness = readiness
        self._run_dir = run_dir
        keys = api_keys(app.state.args)
        self._access = Access(keys)
        self._redaction = Redaction([*keys, *secrets_of(os.environ)])

    def _healthy(self) -> bool:
        return self._engine is None or not self._engine.errored

    async def live(self, _: Request) -> Response:
        return JSONResponse(self._gate.state(), 200 if self._healthy() else 503)

    async def ready(self, _: Request) -> Response:
        """Ready once all API servers are open, and while none of what was proven at the opening is known to be gone."""
        told = rundir.read_json(self._run_dir / rundir.PHASE) or self._gate.state()
        phase = told["phase"] if self._healthy() else "engine dead"
        phase = self._gate.phase if phase == "serving" else phase
        reasons = self._redaction.clean(self._readiness.reasons)
        status = 200 if phase == "serving" and not reasons else 503
        return JSONResponse(self._gate.state() | {"phase": phase, "reasons": reasons}, status)

    async def started(self, _: Request) -> Response:
        return JSONResponse(self._gate.state())

    async def report(self, request: Request) -> Response:
        if not self._access.allows(request.headers.get("authorization")):
            refusal = {"message": "The report needs the server's API key.", "type": "unauthorized", "code": 401}
            return JSONResponse(self._gate.state() | {"error": refusal}, 401, _NO_STORE | _NEEDS_KEY)
        told = {**report(self._run_dir), **self._gate.state(), "reasons": self._readiness.reasons}
        told["now"] = now()
        refusal = {} if self._gate.open else {"error": self._gate.error()}
        return JSONResponse(self._redaction.clean(told) | refusal, self._status(), _NO_STORE)

    async def page(self, _: Request) -> Response:
        return Response(page().html, self._status(), page().headers, "text/html")

    async def page_without_slash(self, _: Request) -> Response:
        return RedirectResponse("splint/", 308)

    def _status(self) -> int:
        """503 until the gate opens: whoever looks only at the status must not take a closed server for an open one."""
        return 200 if self._gate.open else 503
