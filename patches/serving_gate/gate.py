"""The ASGI gate: 503 with the phase on every path, until it is opened; and again while the server drains."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from time import time
from typing import Any

from patches.framework import rundir
from patches.serving_gate.plan import CONTROL_PREFIX, SMOKE_HEADER

__all__ = ["Gate"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Control = Callable[[], Awaitable[Mapping[str, Any]]]

LIVE = "/livez"
# What a shut gate lets the application answer: report and page, with status 503, and while it drains the probes.
WHILE_SHUT = frozenset({"/splint/report", "/splint/", "/splint"})
WHILE_DRAINING = WHILE_SHUT | {LIVE, "/readyz", "/startupz", "/metrics"}
_JSON = (b"content-type", b"application/json")
_RETRY = (b"retry-after", b"2")
_MEANING = {
    "smoke": "The server is up and being tested; it opens when the smoke tests have passed.",
    "failed": "The smoke tests failed; the server is stopping. Its log and verdict say why.",
    "draining": "The server was asked to end: requests in flight are finished, new ones belong to another server.",
}


class Gate:
    """Outermost ASGI application. Open, it costs a request one attribute check.

    Closed, it lets a request pass that carries the smoke secret, which lies in the run directory until the verdict;
    it also answers the control calls of the smoke tests, which exist only as long.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], controls: Mapping[str, Control]) -> None:
        self.app = app
        self.open = False
        self.phase = "smoke"
        self._since = time()
        self._controls = controls
        self._opened = asyncio.Event()

    def enter(self, phase: str) -> None:
        """Go on to ``phase``: ``opening`` holds requests, ``serving`` opens the gate, every other keeps it shut."""
        self.phase = phase
        self._since = time()
        self.open = phase == "serving"
        if self.open:
            self._opened.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or say why not."""
        if self.open or scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif self.phase == "opening":
            await self._opened.wait()
            await self.app(scope, receive, send)
        elif self.phase == "smoke" and self._knows_secret(scope):
            await self._pass(scope, receive, send)
        else:
            await self._refuse(scope, receive, send)

    def _knows_secret(self, scope: Scope) -> bool:
        offered = next((value for name, value in scope["headers"] if name == SMOKE_HEADER.encode()), None)
        run_dir = rundir.current()
        if offered is None or run_dir is None:
            return False
        plan = rundir.read_json(run_dir / rundir.SMOKE_PLAN)
        return plan is not None and hmac.compare_digest(offered, plan["secret"].encode())

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        control = self._controls.get(_path(scope).removeprefix(CONTROL_PREFIX))
        if control is None or not _path(scope).startswith(CONTROL_PREFIX):
            await self.app(scope, receive, send)
        else:
            await _answer(send, 200, dict(await control()))

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013, "reason": self.phase})
        elif self._may_be_seen(scope):
            await self.app(scope, receive, send)
        elif _path(scope) == LIVE and self.phase != "failed":
            await _answer(send, 200, self.state())
        else:
            await _answer(send, 503, self.state() | {"error": self.error()}, _RETRY)

    def _may_be_seen(self, scope: Scope) -> bool:
        paths = WHILE_DRAINING if self.phase == "draining" else WHILE_SHUT
        return scope.get("method") == "GET" and _path(scope) in paths

    def state(self) -> dict[str, Any]:
        """Phase and the seconds since it began."""
        return {"phase": self.phase, "seconds": round(time() - self._since, 3)}

    def error(self) -> dict[str, Any]:
        """Why requests are refused, in the form of the OpenAI API."""
        return {"message": _MEANING.get(self.phase, self.phase), "type": "service_unavailable", "code": 503}


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _answer(send: Send, status: int, body: dict[str, Any], *headers: tuple[bytes, bytes]) -> None:
    content = json.dumps(body).encode()
    length = (b"content-length", str(len(content)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": content})
