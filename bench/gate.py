"""What an open gate adds to a request: in the ASGI path by itself, and through a real server and socket.

``python bench/gate.py`` prints both. Nothing of vLLM is needed: the gate stands around any ASGI application.
"""

from __future__ import annotations

import asyncio
import http.client
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from patches.serving_gate.gate import Gate

__all__ = ["asgi_path_ns", "main"]

CALLS = 20_000
ROUNDS = 15
REQUESTS = 1_000

App = Callable[..., Awaitable[None]]


async def empty(_scope: Any, _receive: Any, _send: Any) -> None:
    """The cheapest application there is."""


async def answering(_scope: Any, _receive: Any, send: Any) -> None:
    """Answers with two bytes."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def open_gate(app: App) -> Gate:
    """A gate around ``app`` as it stands while the server serves."""
    gate = Gate(app, {})
    gate.open, gate.phase = True, "serving"
    return gate


async def _ns_a_call(app: App, calls: int) -> float:
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    start = time.perf_counter_ns()
    for _ in range(calls):
        await app(scope, None, None)
    return (time.perf_counter_ns() - start) / calls


def asgi_path_ns(calls: int = CALLS, rounds: int = ROUNDS) -> float:
    """Nanoseconds that the gate adds to a call: the least of some rounds with it, minus the least without."""

    async def least() -> float:
        gate = open_gate(empty)
        bare, gated = [], []
        for _ in range(rounds):
            bare.append(await _ns_a_call(empty, calls))
            gated.append(await _ns_a_call(gate, calls))
        return min(gated) - min(bare)

    return asyncio.run(least())


class _Served:
    def __init__(self, app: App) -> None:
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", access_log=False))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.connection = http.client.HTTPConnection(*self.server.servers[0].sockets[0].getsockname())

    def request_us(self) -> float:
        """Microseconds of one request on a connection that is kept."""
        start = time.perf_counter_ns()
        self.connection.request("GET", "/")
        self.connection.getresponse().read()
        return (time.perf_counter_ns() - start) / 1000

    def stop(self) -> None:
        self.connection.close()
        self.server.should_exit = True
        self.thread.join()


def end_to_end_us(requests: int = REQUESTS) -> tuple[list[float], list[float]]:
    """Latencies without and with the gate, request by request in turn, so that both see the same machine."""
    bare, gated = _Served(answering), _Served(open_gate(answering))
    pairs = [(bare.request_us(), gated.request_us()) for _ in range(requests)]
    for served in (bare, gated):
        served.stop()
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def main() -> int:
    """Print both figures."""
    print(f"ASGI path: {asgi_path_ns():.0f} ns more a request")
    for without, with_gate in (end_to_end_us() for _ in range(3)):
        medians = statistics.median(without), statistics.median(with_gate)
        spread = statistics.quantiles(without, n=4)
        print(
            f"end to end, {len(without)} requests in turn: median {medians[0]:.1f} us without, {medians[1]:.1f} us"
            f" with the gate; quartiles without it {spread[0]:.1f} to {spread[2]:.1f} us"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
