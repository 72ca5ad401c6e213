"""Smoke tests of a server that somebody else has started: what can be run is run, the rest is named with its reason."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.fake_engine import Engine, listening

from entrypoint.smoke import battery
from entrypoint.smoke.ask import NO_EXTENSIONS
from entrypoint.smoke.check import Context
from entrypoint.smoke.checks import CHECKS
from entrypoint.smoke.outside import plan_for
from entrypoint.smoke.server import Server
from patches.framework.errors import SplintError
from patches.serving_gate.plan import CheckResult

INSIDE = {"roster", "kv_budget", "kv_round_trip", "attention", "pooling", "lmcache", "exercised"}
"""What only a closed gate shows, or does not apply to the model."""


def run(engine: Engine) -> dict[str, CheckResult]:
    with listening(engine) as url:
        plan = plan_for(url, None, 30.0)
        server = Server(plan)
        verdict = battery.run(Context(plan, server, secret_passes=False), CHECKS)
        server.close()
    assert verdict.status == "passed", verdict
    return {result.id: result for result in verdict.checks}


def skipped(results: dict[str, CheckResult]) -> set[str]:
    return {name for name, result in results.items() if result.status == "skipped"}


def test_a_vllm_server_is_compared_and_only_its_inside_is_left_out() -> None:
    results = run(Engine(ranks=1))
    assert skipped(results) == INSIDE
    assert "only behind a closed gate" in results["kv_round_trip"].reason
    assert "only behind a closed gate" in results["kv_series"].evidence["chunked"]["skipped"]


def test_a_server_that_is_not_vllm_is_asked_what_the_openai_api_has() -> None:
    results = run(Engine(ranks=1, plain=True))
    assert {"models", "chat", "stream", "stop"} == set(results) - skipped(results)
    assert results["kv_series"].reason == results["logprobs"].reason == NO_EXTENSIONS


def test_nothing_there_is_said_to_be_nothing() -> None:
    with pytest.raises(SplintError, match="an OpenAI-compatible server"):
        plan_for("http://127.0.0.1:1", None, 1.0)


def test_the_command_says_what_it_left_out() -> None:
    with listening(Engine(ranks=1, plain=True)) as url:
        command = [sys.executable, "-m", "entrypoint.cli", "smoke", "--base-url", url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "left out: roster, kv_budget, kv_round_trip" in ended.stdout


class Mute(BaseHTTPRequestHandler):
    """A server that lists a model and has no endpoint that would answer a prompt."""

    def do_GET(self) -> None:
        listed = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
        self.answer(listed if self.path == "/v1/models" else None)

    def do_POST(self) -> None:
        self.answer(None)

    def answer(self, found: dict[str, Any] | None) -> None:
        body = json.dumps(found or {"error": {"message": "Not Found", "code": 404}}).encode()
        self.send_response(200 if found else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Keep silent."""


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_server_of_which_nothing_could_be_tested_has_not_passed(words: tuple[str, ...]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Mute) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "-m", "entrypoint.cli", "smoke", "--base-url", url, *words]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        server.shutdown()
    assert ended.returncode == 70, ended.stdout + ended.stderr
    assert "found no endpoint that answers a prompt" in ended.stdout
