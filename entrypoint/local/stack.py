"""Starts the LMCache server and the engine, says when they are ready, and ends both, in every phase and in order."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from anyio import fail_after

from entrypoint.local.child import Child
from entrypoint.local.model import make_tiny_model
from entrypoint.local.plan import CachePorts, Plan, cache_command, engine_command, engine_environment
from entrypoint.local.ready import ready_text, wait_for_cache, wait_until_ready
from patches.framework.errors import SplintError

__all__ = ["Stack"]

ENGINE_GRACE_SECONDS = 10.0
CACHE_GRACE_SECONDS = 5.0
CACHE_START_SECONDS = 120.0

_A = TypeVar("_A")
_B = TypeVar("_B")


class Stack:
    """One LMCache server and one engine, from start to end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._started = time.monotonic()
        self._stop = asyncio.Event()
        self._engine: Child | None = None
        self._helpers: list[Child] = []

    async def run(self) -> int:
        """Serve until stopped (0) or until the engine ends (its exit code).

        Raises:
            SplintError: the model could not be made or the LMCache server did not start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._request_stop)
        with tempfile.TemporaryDirectory(prefix="splint-local-") as folder:
            work = asyncio.create_task(self._serve(Path(folder)))
            try:
                stopped = await _first(self._stop.wait(), work)
                return 0 if stopped else work.result()
            finally:
                await _cancel(work)
                await self._end()

    def _request_stop(self) -> None:
        """The first signal ends things in order, the second at once."""
        if self._stop.is_set():
            for child in (self._engine, *self._helpers):
                if child is not None:
                    child.kill()
        self._say("stopping; once more kills")
        self._stop.set()

    async def _serve(self, folder: Path) -> int:
        ports = CachePorts.choose()
        model, cache = await _both(self._model(folder), self._start_cache(ports, folder))
        self._say(f"starting the engine, a minute or two on CPU: {self._plan.served_name}")
        command = engine_command(self._plan, model, ports)
        self._engine = await Child.start("the engine", command, engine_environment(self._plan, folder))
        watchers = [asyncio.create_task(watcher) for watcher in (self._announce(ports), self._watch(cache, ports))]
        try:
            code = await self._engine.wait()
        finally:
            await _cancel(*watchers)
        self._say(f"the engine ended with exit code {code}")
        return code

    async def _model(self, folder: Path) -> str:
        """The model's path or name. The tiny one is made in a process of its own, which takes torch along."""
        if self._plan.model is not None:
            return self._plan.model
        self._say(f"making a tiny random {self._plan.architecture} model, unless it is there")
        command = [sys.executable, "-m", "entrypoint.local.model", self._plan.architecture]
        child = await self._start_helper("the model maker", command, folder / "model.log")
        if await child.wait() != 0:
            raise SplintError(f"the tiny model could not be made:\n{child.tail()}", "a model", "See above.")
        return str(make_tiny_model(self._plan.architecture))

    async def _start_cache(self, ports: CachePorts, folder: Path) -> Child:
        log = folder / "lmcache.log"
        self._say(f"starting the LMCache server; its log is {log}")
        cache = await self._start_helper("the LMCache server", cache_command(self._plan, ports), log)
        answers = wait_for_cache(f"http://127.0.0.1:{ports.http}")
        try:
            with fail_after(CACHE_START_SECONDS):
                ended = await _first(cache.wait(), answers)
        except TimeoutError:
            raise self._cache_failed(cache, f"did not answer within {CACHE_START_SECONDS:.0f} s") from None
        if ended:
            raise self._cache_failed(cache, f"ended with exit code {await cache.wait()}")
        return cache

    @staticmethod
    def _cache_failed(cache: Child, what: str) -> SplintError:
        return SplintError(f"the LMCache server {what}:\n{cache.tail()}", "one that answers", "See its log above.")

    async def _start_helper(self, name: str, command: list[str], log: Path) -> Child:
        # Else the last lines of a program that was killed stay in its buffer.
        env = {**engine_environment(self._plan, log.parent), "PYTHONUNBUFFERED": "1"}
        child = await Child.start(name, command, env, log)
        self._helpers.append(child)
        return child

    async def _announce(self, ports: CachePorts) -> None:
        await wait_until_ready(self._plan.url, self._say)
        print(ready_text(self._plan, time.monotonic() - self._started, ports.messages), flush=True)

    async def _watch(self, cache: Child, ports: CachePorts) -> None:
        code = await cache.wait()
        self._say(f"the LMCache server ended with exit code {code}, the engine goes on without it:\n{cache.tail()}")
        self._say(f"to cache again, start it in another terminal: {shlex.join(cache_command(self._plan, ports))}")

    async def _end(self) -> None:
        """The engine first: it may still want to store what it holds."""
        if self._engine is not None:
            await self._engine.stop(ENGINE_GRACE_SECONDS + self._plan.drain_s)
        for child in reversed(self._helpers):
            await child.stop(CACHE_GRACE_SECONDS)
        self._say("everything that was started has ended")

    def _say(self, text: str) -> None:
        print(f"[local {time.monotonic() - self._started:5.1f} s] {text}", flush=True)


async def _first(awaited: Coroutine[Any, Any, Any], other: asyncio.Task[Any] | Coroutine[Any, Any, Any]) -> bool:
    """Whether ``awaited`` was done before or with ``other``; the one that was not is cancelled."""
    first, second = asyncio.ensure_future(awaited), asyncio.ensure_future(other)
    try:
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        return first.done()
    finally:
        await _cancel(first, second)


async def _both(one: Coroutine[Any, Any, _A], other: Coroutine[Any, Any, _B]) -> tuple[_A, _B]:
    """Both results; the first failure cancels the other."""
    first, second = asyncio.ensure_future(one), asyncio.ensure_future(other)
    try:
        return await asyncio.gather(first, second)
    finally:
        await _cancel(first, second)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
