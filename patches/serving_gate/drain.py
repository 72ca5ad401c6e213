"""Between SIGTERM and the end: requests in flight end whole, new ones are refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from patches.serving_gate.gate import Gate

__all__ = ["ATTRIBUTE", "Drain"]

# Where the engine client carries its drain: its shutdown is the one place through which every orderly end passes.
ATTRIBUTE = "_splint_drain"
_PACE_S = 0.05


class Drain:
    """Shuts the gate to new requests and waits for those that it let in.

    Args:
        gate: Turned to the phase ``draining``.
        app: The application; ``app.state.server`` is uvicorn's server.
        note: Tells everybody of the phase.
    """

    def __init__(self, gate: Gate, app: Any, note: Callable[[], None]) -> None:
        self._gate = gate
        self._app = app
        self._note = note
        self._begun = False

    def run(self, timeout: float | None) -> float | None:
        """Drain, once, and return what is left of ``timeout`` in seconds.

        Blocks, so it does nothing in the thread of the event loop that answers the requests.
        """
        if self._begun or _in_event_loop() or self._gate.phase != "serving":
            return timeout
        self._begun = True
        self._gate.enter("draining")
        self._note()
        began = time.monotonic()
        while timeout and self._in_flight() and time.monotonic() - began < timeout:
            time.sleep(_PACE_S)
        return max(0.0, timeout - (time.monotonic() - began)) if timeout else timeout

    def _in_flight(self) -> int:
        """Requests that are being answered. None can be where the engine has died."""
        if self._app.state.engine_client.errored:
            return 0
        return len(self._app.state.server.server_state.tasks)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
