"""Test only: an ASGI middleware of vLLM's (``--middleware falsified.Falsified``) that falsifies requests or answers."""

from __future__ import annotations

import json
import math
import os
from typing import Any

MATTER = os.environ.get("DISHONEST", "")
_LAST: dict[str, Any] = {}


def _request(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the engine gets in the place of what was asked."""
    if MATTER == "stop":
        return {name: value for name, value in body.items() if name != "stop"}
    if MATTER == "long_prompt" and path.endswith("/completions") and len(body.get("prompt", "")) > 100:
        return {**body, "prompt": body["prompt"][:100]}
    if MATTER == "parallel" and _LAST.get("busy", 0) > 1:
        return {**body, "prompt": _LAST["prompt"]}
    _LAST["prompt"] = body.get("prompt")
    return body


def _answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the client gets in the place of what was answered."""
    if MATTER == "models" and path.endswith("/models"):
        return {**body, "data": [{**model, "id": "other"} for model in body["data"]]}
    if MATTER == "chat" and body.get("usage"):
        return {**body, "usage": {**body["usage"], "completion_tokens": body["usage"]["completion_tokens"] + 1}}
    if MATTER == "pooling" and path.endswith("/embeddings"):
        return {**body, "data": [{**row, "embedding": [math.nan, *row["embedding"][1:]]} for row in body["data"]]}
    if MATTER == "logprobs":
        return dict(_raised(body))
    return body


def _raised(value: Any, inside: bool = False) -> Any:
    """Log-probabilities, 20 nats higher."""
    if isinstance(value, dict):
        return {name: _raised(item, inside or name == "logprobs") for name, item in value.items()}
    if isinstance(value, list):
        return [_raised(item, inside) for item in value]
    return value + 20.0 if inside and isinstance(value, float) else value


class Falsified:
    """Passes requests on, falsified; answers that are JSON come back falsified, streams without their second piece."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if MATTER == "dp_ranks":
            others = [pair for pair in scope["headers"] if pair[0] != b"x-data-parallel-rank"]
            scope = {**scope, "headers": [*others, (b"x-data-parallel-rank", b"0")]}
        _LAST["busy"] = _LAST.get("busy", 0) + 1
        try:
            await self._app(*await _falsified(scope, receive), _Falsifying(scope["path"], send))
        finally:
            _LAST["busy"] -= 1


async def _falsified(scope: Any, receive: Any) -> tuple[Any, Any]:
    if scope["method"] != "POST":
        return scope, receive
    whole, more = b"", True
    while more:
        message = await receive()
        whole, more = whole + message.get("body", b""), message.get("more_body", False)
    body = json.dumps(_request(scope["path"], json.loads(whole))).encode()
    headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return messages.pop() if messages else await receive()

    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}, again


class _Falsifying:
    def __init__(self, path: str, send: Any) -> None:
        self._path = path
        self._send = send
        self._start: Any = None
        self._whole = b""
        self._pieces = 0

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            if not self._is_json():
                await self._send(message)
        elif self._is_json():
            await self._answer(message)
        else:
            self._pieces += 1
            left_out = MATTER == "stream" and self._pieces == 2
            await self._send({**message, "body": b""} if left_out else message)

    def _is_json(self) -> bool:
        kind: bytes = dict(self._start["headers"]).get(b"content-type", b"")
        return kind.startswith(b"application/json")

    async def _answer(self, message: Any) -> None:
        self._whole += message.get("body", b"")
        if message.get("more_body", False):
            return
        body = json.dumps(_answer(self._path, json.loads(self._whole))).encode()
        kept = [pair for pair in self._start["headers"] if pair[0] != b"content-length"]
        await self._send({**self._start, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})
