"""A gate with its routes and what follows the opening, around a small application on a real uvicorn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from patches.framework import rundir
from patches.serving_gate.after import After
from patches.serving_gate.gate import Gate
from patches.serving_gate.routes import add_routes

__all__ = ["Stage", "config", "staged", "until"]


def config(**parallel: Any) -> Any:
    """What of vLLM's configuration matters after the opening."""
    usual = {
        "data_parallel_size": 1, "data_parallel_size_local": 1, "data_parallel_rank": 0, "local_engines_only": False,
        "enable_elastic_ep": False, "data_parallel_backend": "mp", "_api_process_rank": 0,
    }  # fmt: skip
    model = SimpleNamespace(runner_type="generate")
    return SimpleNamespace(parallel_config=SimpleNamespace(**usual | parallel), model_config=model, shutdown_timeout=5)


def until(look: Callable[[], Any], within_s: float = 30.0) -> Any:
    """What ``look`` says once it says something, or at the end of the time."""
    deadline = time.monotonic() + within_s
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


class Stage:
    """The parts of one API server that the gate's patch adds, without an engine behind them."""

    def __init__(self, run_dir: Path, *keys: str) -> None:
        self.run_dir = rundir.prepare(run_dir)
        self.finish = asyncio.Event()
        self.unfinished = 0
        self.app = Starlette()
        self.app.add_route("/slow", self.slow)
        self.app.add_route("/metrics", lambda _: Response("up 1"))
        self.app.add_route("/health", lambda _: Response("well"))
        self.engine = SimpleNamespace(
            errored=False, vllm_config=config(), get_num_unfinished_requests=lambda: self.unfinished
        )
        self.app.state.engine_client = self.engine
        self.app.state.args = SimpleNamespace(api_key=list(keys) or None)
        self.gate = Gate(self.app.build_middleware_stack(), {})
        self.app.middleware_stack = self.gate
        self.after = After(self.gate, self.app, run_dir)
        add_routes(self.app, self.gate, self.after.readiness, run_dir)
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="error", lifespan="off"))
        self.app.state.server = self.server
        self._loop: asyncio.AbstractEventLoop | None = None

    async def slow(self, _: Request) -> Response:
        """A stream that ends when :attr:`finish` is set."""

        async def parts() -> Any:
            yield b"begun "
            await self.finish.wait()
            yield b"whole"

        return StreamingResponse(parts())

    def enter(self, phase: str) -> None:
        """Bring gate and run directory to ``phase``."""
        self.gate.enter(phase)
        rundir.write_json(self.run_dir / rundir.PHASE, {"phase": phase})

    def url(self, path: str) -> str:
        """The address of ``path`` on the real port."""
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}{path}"

    def serve(self) -> None:
        """Serve until the end; in a thread of its own."""

        async def serving() -> None:
            self._loop = asyncio.get_running_loop()
            await self.server.serve()

        asyncio.run(serving())

    def call(self, function: Callable[[], Any]) -> None:
        """Call ``function`` in the server's loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)


@contextmanager
def staged(stage: Stage) -> Iterator[Stage]:
    """Serve during the block."""
    thread = threading.Thread(target=stage.serve)
    thread.start()
    until(lambda: stage.server.started)
    try:
        yield stage
    finally:
        stage.call(stage.finish.set)
        stage.server.should_exit = True
        thread.join(60)
