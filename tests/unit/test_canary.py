"""The canary: after idle time one token of each rank, through the application; without it the server is unready."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from support.gate_stage import Stage

from entrypoint import health
from patches.framework import rundir
from patches.serving_gate import canary
from patches.serving_gate.canary import Canary, Question
from patches.serving_gate.readiness import Readiness, look_after

Answer = Callable[[Request], Awaitable[Response]]
NO_JSON = "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"


async def well(_: Request) -> Response:
    return JSONResponse({"usage": {"completion_tokens": 1}})


async def broken(_: Request) -> Response:
    return JSONResponse({"error": "engine dead"}, 500)


async def empty(_: Request) -> Response:
    return JSONResponse({"usage": {"completion_tokens": 0}})


async def raising(_: Request) -> Response:
    raise RuntimeError


async def garbled(_: Request) -> Response:
    return Response("no JSON")


async def silent(_: Request) -> Response:
    await asyncio.sleep(300)
    return Response()


def question(answer: Answer, *, key: str | None = None, ranks: tuple[int, ...] = (0,)) -> Question:
    app = Starlette()
    app.add_route("/v1/completions", answer, methods=["POST"])
    return Question(app, "tiny", key, ranks, within_s=0.2 if answer is silent else 30.0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (well, None),
        (broken, 'the canary\'s completion on DP0 failed: HTTP 500: {"error":"engine dead"}'),
        (empty, "the canary's completion on DP0 failed: an answer without a token"),
        (silent, "the canary's completion on DP0 failed: no answer within 0.2 s"),
        (raising, "the canary's completion on DP0 failed: HTTP 500: Internal Server Error"),
        (garbled, f"the canary's completion on DP0 failed: no answer that can be read ({NO_JSON})"),
    ],
)
def test_only_an_answer_with_a_token_is_one(answer: Answer, said: str | None) -> None:
    assert asyncio.run(question(answer).ask()) == said


def test_every_rank_is_asked_with_the_key_and_the_first_that_fails_is_named() -> None:
    asked: list[tuple[str | None, str | None]] = []

    async def answer(request: Request) -> Response:
        asked.append((request.headers.get("x-data-parallel-rank"), request.headers.get("authorization")))
        body = json.loads(await request.body())
        assert (body["model"], body["max_tokens"]) == ("tiny", 1)
        return await (broken if request.headers["x-data-parallel-rank"] == "1" else well)(request)

    said = asyncio.run(question(answer, key="k", ranks=(2, 3, 4)).ask())
    assert said is not None
    assert said.startswith("the canary's completion on DP3 failed")
    # As vLLM counts them: from the first rank of this server, which under hybrid load balancing is not DP0.
    assert asked == [("0", "Bearer k"), ("1", "Bearer k")]


async def run_until(true: Callable[[], bool], work: Coroutine[Any, Any, None]) -> None:
    """Let ``work``, which would go on for ever, run until then; 30 seconds at most."""
    running = asyncio.create_task(work)
    deadline = time.monotonic() + 30
    while not true() and not running.done() and time.monotonic() < deadline:  # noqa: ASYNC110 - a file, or a counter
        await asyncio.sleep(0.01)
    assert true()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def flights(tmp_path: Path, *, busy: bool, looks: int) -> int:
    """How often a canary that flies after 0.05 idle seconds has flown once it has looked that often."""
    flown, looked = 0, 0

    async def answer(request: Request) -> Response:
        nonlocal flown
        flown += 1
        return await well(request)

    def is_busy() -> bool:
        nonlocal looked
        looked += 1
        return busy

    asyncio.run(run_until(lambda: looked >= looks, Canary(question(answer), is_busy, tmp_path, 0.05).run()))
    return flown


def test_it_flies_only_while_the_server_is_idle(tmp_path: Path) -> None:
    assert flights(tmp_path, busy=True, looks=4) == 0
    assert flights(tmp_path, busy=False, looks=6) >= 2


def test_it_ends_when_it_is_cancelled_the_moment_its_answer_comes(tmp_path: Path) -> None:
    """With ``asyncio.wait_for`` of Python 3.11 the cancellation was lost: the server's end then waited for ever."""

    async def scenario() -> bool:
        async def answer(request: Request) -> Response:
            flying.cancel()
            return await well(request)

        flying = asyncio.create_task(Canary(question(answer), lambda: False, tmp_path, 0.05).run())
        return bool((await asyncio.wait([flying], timeout=30))[0])

    assert asyncio.run(scenario())


def test_a_canary_without_an_answer_makes_the_server_unready_until_one_comes(tmp_path: Path) -> None:
    readiness = Readiness(lambda *_: None)

    async def looked() -> list[str]:
        watch = asyncio.create_task(look_after(readiness, {"canary": lambda: canary.look_at(tmp_path)}))
        await asyncio.sleep(0)
        watch.cancel()
        return readiness.reasons

    async def scenario() -> None:
        assert await looked() == []
        failing = Canary(question(broken), lambda: False, tmp_path, 1)
        await failing.fly()
        assert [reason[:12] for reason in await looked()] == ["the canary's"]
        rundir.write_json(rundir.prepare(tmp_path) / rundir.PHASE, {"phase": "serving"})
        assert not health.health(tmp_path).healthy
        failing._question = replace(failing._question, app=question(well).app)
        await failing.fly()
        assert await looked() == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("setting", "runner", "wanted"),
    [("off", "generate", False), ("", "generate", False), ("30", "generate", True), ("30", "pooling", False)],
)
def test_it_is_off_unless_asked_for_and_able(
    monkeypatch: pytest.MonkeyPatch, setting: str, runner: str, wanted: bool
) -> None:
    monkeypatch.setenv(canary.SETTING, setting)
    assert canary.wanted(SimpleNamespace(model_config=SimpleNamespace(runner_type=runner))) is wanted


def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, until: Callable[[], bool]) -> Stage:
    """An API server of that number, with a canary after 0.05 idle seconds, that was watched until then."""
    monkeypatch.setenv(canary.SETTING, "0.05")
    stage = Stage(tmp_path)

    async def answer(request: Request) -> Response:
        """As vLLM's handlers do, it looks for its server's state by way of the application that took the request."""
        return await (well if request.app.state.engine_client is stage.engine else broken)(request)

    stage.app.add_route("/v1/completions", answer, methods=["POST"])
    stage.engine.vllm_config.parallel_config._api_process_rank = rank
    stage.app.state.args.served_model_name = ["tiny"]
    stage.enter("serving")
    asyncio.run(run_until(until, stage.after.run()))
    return stage


@pytest.mark.parametrize("rank", [-1, 0])
def test_the_first_of_several_api_servers_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    watched(tmp_path, monkeypatch, rank, until=(tmp_path / rundir.CANARY).exists)
    assert (rundir.read_json(tmp_path / rundir.CANARY) or {})["reason"] is None


def test_the_others_look_at_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rundir.write_json(tmp_path / rundir.CANARY, {"reason": "no answer"})
    half_a_second = time.monotonic() + 0.5
    stage = watched(tmp_path, monkeypatch, rank=1, until=lambda: time.monotonic() > half_a_second)
    assert (rundir.read_json(tmp_path / rundir.CANARY) or {})["reason"] == "no answer"
    assert stage.after.readiness.reasons == ["no answer"]


def test_what_it_says_of_another_application_stays_json(tmp_path: Path) -> None:
    asyncio.run(Canary(question(broken), lambda: False, tmp_path, 1).fly())
    told: Any = rundir.read_json(tmp_path / rundir.CANARY)
    assert set(told) == {"reason", "at", "seconds"}
