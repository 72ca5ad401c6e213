"""Until the smoke tests have passed, every form of start answers 503 on every path; then it serves as stock does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.servers import Server, running

from patches.framework import rundir
from patches.kv_probe import PROBES
from patches.serving_gate.plan import CONTROL_PREFIX, SMOKE_HEADER
from patches.supervision import DRAIN_S

VLLM = str(Path(sys.executable).with_name("vllm"))
FORMS = {
    "vllm serve": ((VLLM, "serve"), ("--api-server-count", "1")),
    "vllm serve, several API servers": ((VLLM, "serve"), ("--api-server-count", "2")),
    "api_server module": (("-m", "vllm.entrypoints.openai.api_server"), ()),
    "called by another program": (("-c", "from vllm.entrypoints.cli.main import main; main()", "serve"), ()),
}
LONG = {"api_server module", "vllm serve"}
"""Forms that other end-to-end tests of `make test` start, too; here in `make test-full`."""
SUPERVISED = set(FORMS) - {"called by another program"}
PATHS = ("/health", "/v1/models", "/metrics", "/docs", "/readyz", "/startupz", "/splint/report", "/nowhere")


def watch(server: Server, run: Path, secrets: set[str]) -> dict[str, set[tuple[int, str]]]:
    """Ask every path in turn from the first accepted connection until /health is 200; what came before, by path.

    Whoever may read the run directory finds the smoke run's secret there; it is added to ``secrets``.
    """
    seen: dict[str, set[tuple[int, str]]] = {path: set() for path in PATHS}
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        secrets |= {plan["secret"] for plan in (rundir.read_json(run / rundir.SMOKE_PLAN),) if plan}
        for path in PATHS:
            answer = server.get(path)
            if answer is None:
                break
            if path == "/health" and answer.status_code == 200:
                return seen
            if answer.status_code != 200 or path != "/health":
                seen[path].add(
                    (
                        answer.status_code,
                        answer.json().get("phase", "") if "json" in answer.headers["content-type"] else "",
                    )
                )
        if server.process is not None and server.process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(server.tail())


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.full) if form in LONG else form for form in FORMS]
)
def test_every_path_answers_503_with_the_phase_until_the_gate_opens(
    build: Callable[..., Server], form: str, tmp_path: Path
) -> None:
    start, flags = FORMS[form]
    run, secrets = tmp_path / "run", set[str]()
    with running(build(*flags, form=start, env={"SPLINT_RUN_DIR": str(run), "SPLINT_CANARY_IDLE_S": "1"})) as server:
        seen = watch(server, run, secrets)
        for path, answers in seen.items():
            assert (503, "smoke") in answers, f"{path}: {answers}"
        # The last round of questions may meet the gate as it opens; /health is asked first and must never be early.
        assert seen["/health"] == {(503, "smoke")}
        again = [httpx.get(server.base_url + "/health").status_code for _ in range(40)]
        assert set(again) == {200}, "an open gate does not close again, in no API server"
        check_serving(server)
        check_secret(server, secrets)
        server.wait_for((run / rundir.CANARY).exists, 120)
        assert (rundir.read_json(run / rundir.CANARY) or {})["reason"] is None, "the idle server answered itself"
        code, seconds = server.stop()
        print(f"{form}: SIGTERM while serving, code {code} after {seconds:.1f} s")
        assert code == 0
        assert seconds < 10 + DRAIN_S
        if form in SUPERVISED:
            assert server.left() == []


def check_serving(server: Server) -> None:
    """What an open gate shows, and that the smoke run's doors are shut."""
    for path in ("/livez", "/readyz", "/startupz"):
        answer = httpx.get(server.base_url + path)
        assert (answer.status_code, answer.json()["phase"]) == (200, "serving")
    report: dict[str, Any] = httpx.get(server.base_url + "/splint/report").json()
    assert report["verdict"]["status"] == "passed"
    metrics = httpx.get(server.base_url + "/metrics").text
    assert 'splint_smoke_passed{level="full"' in metrics
    assert "splint_patch_info{" in metrics
    answer = httpx.post(
        server.base_url + "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2}, timeout=30
    )
    assert answer.json()["usage"]["completion_tokens"] == 2


def check_secret(server: Server, secrets: set[str]) -> None:
    """The secret of the smoke run was one, is in no log, and opens nothing any more, no control call either."""
    (secret,) = secrets
    assert len(secret) >= 32
    assert secret not in server.text()
    for name in ("reset_prefix_cache", *PROBES):
        path = f"{server.base_url}{CONTROL_PREFIX}/{name}"
        assert httpx.post(path, headers={SMOKE_HEADER: secret}).status_code == 404


def test_off_serves_as_stock_would(build: Callable[..., Server]) -> None:
    server = build("--api-server-count", "1", env={"SPLINT_MODE": "off"})
    with running(server):
        server.wait_ready()
        assert httpx.get(server.base_url + "/splint/report").status_code == 404
        assert httpx.get(server.base_url + "/readyz").status_code == 404
        assert "splint_" not in httpx.get(server.base_url + "/metrics").text


def test_a_server_without_the_start_up_line_is_refused(build: Callable[..., Server]) -> None:
    """``-S`` keeps every .pth line away, in the server and in the processes that it spawns; the plugin refuses."""
    folders = [entry for entry in sys.path if entry]
    code = f"import sys; sys.path[:] = {folders!r}; from vllm.entrypoints.cli.main import main; main()"
    server = build(form=("-S", "-c", code, "serve"))
    with running(server):
        ended = server.wait_end(120)
        assert ended != 0
        assert "the start-up hooks did not run in this process" in server.text()
        assert "open for traffic" not in server.text()
