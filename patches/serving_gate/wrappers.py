"""vLLM's ``serve_http`` with the gate around the application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any

from patches.framework import rundir
from patches.framework.errors import RunDirectoryError
from patches.framework.records import Seam
from patches.kv_probe import PROBES
from patches.serving_gate.after import After
from patches.serving_gate.gate import Control, Gate
from patches.serving_gate.opening import Opening
from patches.serving_gate.routes import add_routes

__all__ = ["serve_http"]


def serve_http(seam: Seam) -> Callable[..., Awaitable[Any]]:
    """Serve behind the gate. A server without an engine (render only) has nothing to prove and is left alone."""

    @wraps(seam.original)
    async def gated(app: Any, sock: Any, *args: Any, **kwargs: Any) -> Any:
        seam.count()
        if app.state.engine_client is None:
            return await seam.original(app, sock, *args, **kwargs)
        opening, after = _gate(app, sock)
        opened = asyncio.create_task(opening.run(), name="splint-opening")
        tasks = (opened, asyncio.create_task(_stop_on_error(opened, app)), asyncio.create_task(_follow(opened, after)))
        try:
            return await seam.original(app, sock, *args, **kwargs)
        finally:
            for task in tasks:
                task.cancel()

    return gated


def _gate(app: Any, sock: Any) -> tuple[Opening, After]:
    run_dir = rundir.current()
    if run_dir is None:
        raise RunDirectoryError(
            "the API server has no run directory", f"{rundir.ENV}", "Do not turn off process_roster, or set it."
        )
    gate = Gate(app.middleware_stack or app.build_middleware_stack(), _controls(app.state.engine_client))
    # The application has started, so add_middleware is refused: stand around its whole stack instead.
    app.middleware_stack = gate
    after = After(gate, app, run_dir)
    add_routes(app, gate, after.readiness, run_dir)
    return Opening(gate, app, sock, run_dir), after


def _controls(engine: Any) -> Mapping[str, Control]:
    async def reset_prefix_cache() -> Mapping[str, Any]:
        return {"reset": await engine.reset_prefix_cache()}

    def probe(name: str) -> Control:
        async def ask() -> Mapping[str, Any]:
            return {"engines": await engine.engine_core.call_utility_all_async("splint_probe", name)}

        return ask

    return {"/reset_prefix_cache": reset_prefix_cache, **{f"/{name}": probe(name) for name in PROBES}}


async def _follow(opened: asyncio.Task[None], after: After) -> None:
    """What comes after the opening, for as long as the server serves."""
    await asyncio.wait((opened,))
    await after.run()


async def _stop_on_error(opening: asyncio.Task[None], app: Any) -> None:
    """A gate that breaks must not stay shut in silence: its error ends the server."""
    try:
        await opening
    except asyncio.CancelledError:
        raise
    except Exception:
        app.state.server.should_exit = True
        raise
