"""A tiny completion against the server itself after some idle time: who answers probes may not answer prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio import fail_after

from patches.framework import rundir, settings
from patches.serving_gate.access import api_keys
from patches.serving_gate.expected import served_dp_ranks
from patches.serving_gate.phases import now

__all__ = ["SETTING", "Canary", "Question", "look_at", "wanted"]

SETTING = "SPLINT_CANARY_IDLE_S"
ANSWERED_WITHIN_S = 30.0
_PACE_S = 1.0
_PROMPT = (1, 2, 3, 4)

App = Callable[..., Awaitable[None]]


def wanted(config: Any) -> bool:
    """Whether this server keeps a canary: asked for, and able to complete a prompt."""
    return bool(settings.get(SETTING)) and bool(config.model_config.runner_type == "generate")


def look_at(run_dir: Path) -> str | None:
    """What the last canary found, for every API server of this server; None where it was answered, or none flew yet."""
    reason: str | None = (rundir.read_json(run_dir / rundir.CANARY) or {}).get("reason")
    return reason


@dataclass(frozen=True)
class Question:
    """The completion, sent through the whole application but not through the port.

    Attributes:
        app: The application, gate included.
        model: First served model name.
        key: A key that the server takes, or None.
        ranks: The data-parallel ranks to ask, one after the other: all that this server sends requests to.
        within_s: Seconds for each answer.
    """

    app: App
    model: str
    key: str | None
    ranks: Sequence[int]
    within_s: float = ANSWERED_WITHIN_S

    @classmethod
    def of(cls, app: Any) -> Question:
        """The question for the server of ``app``."""
        args, config = app.state.args, app.state.engine_client.vllm_config
        model = (args.served_model_name or [args.model])[0]
        return cls(app, model, next(iter(api_keys(args)), None), served_dp_ranks(config.parallel_config))

    async def ask(self) -> str | None:
        """None where every rank answered, else the first rank that did not, and why."""
        for rank in self.ranks:
            try:
                # Not asyncio.wait_for: before Python 3.12 it can lose the cancellation of its caller.
                with fail_after(self.within_s):
                    problem = await self._ask(rank)
            except TimeoutError:
                problem = f"no answer within {self.within_s:g} s"
            except Exception as error:  # noqa: BLE001 - whatever it is, the canary must fly again and not end unnoticed
                problem = f"no answer that can be read ({type(error).__name__}: {error})"
            if problem:
                return f"the canary's completion on DP{rank} failed: {problem}"
        return None

    async def _ask(self, rank: int) -> str | None:
        import httpx

        # vLLM counts from the first rank that this server sends requests to, which need not be DP0.
        headers = {"X-data-parallel-rank": str(self.ranks.index(rank))} if len(self.ranks) > 1 else {}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        body = {"model": self.model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://canary") as client:
            answer = await client.post("/v1/completions", json=body, headers=headers)
        if answer.status_code != httpx.codes.OK:
            return f"HTTP {answer.status_code}: {answer.text[:200]}"
        tokens = (answer.json().get("usage") or {}).get("completion_tokens")
        return None if tokens else "an answer without a token"


class Canary:
    """Asks once the server has been idle, and again after each further idle time.

    Args:
        question: What to ask.
        busy: Whether requests are in flight; looked at once a second, so a short one may go unseen.
        run_dir: Where every API server finds the result.
        idle_s: Seconds without a request in flight after which the canary flies.
    """

    def __init__(self, question: Question, busy: Callable[[], bool], run_dir: Path, idle_s: float) -> None:
        self._question = question
        self._busy = busy
        self._run_dir = run_dir
        self._idle_s = idle_s

    async def run(self) -> None:
        """Fly until cancelled."""
        since = time.monotonic()
        while True:
            await asyncio.sleep(min(_PACE_S, self._idle_s))
            if self._busy():
                since = time.monotonic()
            elif time.monotonic() - since >= self._idle_s:
                await self.fly()
                since = time.monotonic()

    async def fly(self) -> None:
        """Ask once and leave word of the answer."""
        began = time.monotonic()
        reason = await self._question.ask()
        result = {"reason": reason, "at": now(), "seconds": round(time.monotonic() - began, 3)}
        rundir.write_json(self._run_dir / rundir.CANARY, result)
