from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from entrypoint import report
from patches.framework import rundir
from patches.framework.errors import SplintError

REPORT: dict[str, Any] = {
    "schema": 1,
    "phase": "serving",
    "version": "0.1.0",
    "mode": "enforce",
    "libraries": {"vllm": "0.32.0", "lmcache": "0.5.6"},
    "patches": [{"id": "serving_gate", "purpose": "Guards.", "states": {"applied": ""}, "calls": 3}, {"id": "bare"}],
    "processes": [
        {"role": "worker", "dp_rank": 1, "rank": 0, "pid": 42, "alive": False, "plugin_verified": True,
         "patch_set": "abc", "patches": [{"id": "serving_gate", "state": "applied"}, {"id": "bare", "state": "inert"}]},
        {"role": "api_server", "rank": 0, "pid": 41, "alive": True},
    ],
    "kv_budget": {
        "applies": True, "policy": "align",
        "ranks": [{"dp_rank": 1, "blocks": 90, "tokens": 1440, "host": "node7", "device": "cpu"}],
    },
    "kv_profiles": [
        {"dp_rank": 1, "fingerprint": "kv1-0123456789ab", "digest": "0123456789ab" * 5, "weights": "commit:" + "c" * 40,
         "summary": "fp8_e5m2 · 2 x full_attention 2 x 64"},
    ],
    "verdict": {
        "status": "passed", "seconds": 3.2,
        "checks": [
            {"id": "chat", "status": "skipped", "seconds": 0.1, "reason": "no chat template"},
            {"id": "models", "status": "passed", "seconds": 0.01, "proves": "It is listed."},
        ],
    },
    "timings_ms": {"hooks": 12.4, "note": "text"},
}  # fmt: skip


def shown(data: dict[str, Any], width: int = 120) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(report.render(data))
    return capture.get()


def test_a_full_report_shows_each_part() -> None:
    text = shown(REPORT)
    for part in ("phase serving", "vllm 0.32.0", "serving_gate", "in no process", "DP1 rank 0", "1 of 2",
                 "one for all (align)", "1440", "node7 cpu",
                 "kv1-0123456789ab", "fp8_e5m2 · 2 x", "commit:ccccc",
                 "passed in 3.2 s", "no chat template", "It is listed.", "hooks 12"):  # fmt: skip
        assert part in text


def test_a_server_whose_processes_are_all_gone_has_ended() -> None:
    gone = [{**REPORT["processes"][0], "alive": False}]
    assert "ended (the last phase was serving)" in shown({**REPORT, "processes": gone})


def test_an_address_that_is_none_is_said_to_be() -> None:
    with pytest.raises(SplintError, match="no answer from"):
        report.fetch("http://[::1")


@pytest.mark.parametrize("missing", [key for key in REPORT if key != "phase"])
def test_a_report_without_a_part_is_shown_without_it(missing: str) -> None:
    assert "phase serving" in shown({key: value for key, value in REPORT.items() if key != missing})


@pytest.mark.parametrize("empty", [None, [], {}])
def test_empty_parts_are_left_out(empty: Any) -> None:
    text = shown({"phase": "loading", "patches": empty, "processes": empty, "verdict": empty, "timings_ms": empty})
    assert text.strip() == "phase loading"


def test_a_run_directory_tells_of_a_server_that_has_ended(tmp_path: Path) -> None:
    rundir.prepare(tmp_path)
    rundir.write_json(tmp_path / rundir.PHASE, {"phase": "smoke failed"})
    rundir.write_json(tmp_path / rundir.VERDICT, REPORT["verdict"])
    found = report.from_folder(tmp_path)
    assert (found["phase"], found["verdict"]["status"]) == ("smoke failed", "passed")
    assert str(tmp_path) in shown(found, width=200)


def test_the_named_run_directory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rundir.ENV, str(tmp_path))
    assert report.newest_folder() is None
    rundir.write_json(tmp_path / rundir.PHASE, {"phase": "loading"})
    assert report.newest_folder() == tmp_path


def test_the_newest_private_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rundir.ENV, raising=False)
    monkeypatch.setattr(rundir, "bases", lambda: [tmp_path])
    folder = tmp_path / "splint-x"
    folder.mkdir()
    rundir.write_json(folder / rundir.PHASE, {"phase": "loading"})
    assert report.newest_folder() == folder


@pytest.fixture
def answering() -> Iterator[Any]:
    """A server that answers every GET with ``answer`` (status, body)."""

    class Handler(BaseHTTPRequestHandler):
        answer: tuple[int, str] = (200, "{}")

        def do_GET(self) -> None:
            status, body = self.answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    Handler.url = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    yield Handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_closed_gate_is_a_report_too(answering: Any) -> None:
    answering.answer = (503, json.dumps({"phase": "smoke"}))
    assert report.fetch(answering.url + "/")["phase"] == "smoke"


@pytest.mark.parametrize("answer", [(404, '{"detail": "Not Found"}'), (200, "<html>"), (200, "[1]")])
def test_an_answer_without_a_report_says_where_it_was_looked_for(answering: Any, answer: tuple[int, str]) -> None:
    answering.answer = answer
    with pytest.raises(SplintError, match="/splint/report"):
        report.fetch(answering.url)


def test_no_server_is_one_message() -> None:
    with pytest.raises(SplintError, match=r"no answer from http://127\.0\.0\.1:1/splint/report"):
        report.fetch("http://127.0.0.1:1")
