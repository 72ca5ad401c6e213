"""The web page in a real browser: on a shut gate, with a key, from the keyboard, and on the main job's server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import Tab, browser
from support.gate_stage import Stage, staged, until
from support.servers import Server

from patches.framework import roster, rundir
from patches.serving_gate import phases

pytestmark = pytest.mark.full

MARKUP = "<img src=x onerror=document.title='taken'>"
KEY = "the-key-of-this-server"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.getbasetemp() / "pictures"
    folder.mkdir(exist_ok=True)
    return folder


def check(name: str, status: str = "passed", reason: str = "") -> dict[str, Any]:
    return {"id": name, "proves": f"{name} is right.", "status": status, "seconds": 0.4, "reason": reason,
            "evidence": {"tokens": 64}}  # fmt: skip


def attest(run_dir: Path, number: int, role: str, **changes: Any) -> None:
    entry = {
        "role": role, "dp_rank": None, "rank": None, "pid": os.getpid(), "patch_set": "0123456789ab", "splint": "0.1.0",
        "start_time": roster.start_time(os.getpid()), "mode": "enforce", "seams": [], "timings_ms": {}, "facts": {},
        "libraries": {"vllm": "0.32.0", "lmcache": "0.5.6"}, "plugin_verified": True, "host": "node7",
        "patches": [{"id": "serving_gate", "state": "applied", "reason": ""},
                    {"id": "kv_budget", "state": "refused", "reason": MARKUP}],
    }  # fmt: skip
    rundir.write_json(run_dir / rundir.ROSTER / f"{number}.json", entry | changes)


@pytest.fixture
def shut(tmp_path: Path) -> Iterator[Stage]:
    """A gate in its smoke tests, with two processes and one check that has ended."""
    with staged(Stage(tmp_path)) as stage:
        attest(tmp_path, 1, "api_server", rank=0)
        attest(tmp_path, 2, "worker", dp_rank=0, rank=0, start_time=1)
        phases.note(tmp_path, "smoke", 20, "smoke")
        rundir.write_json(tmp_path / rundir.SMOKE_SO_FAR, [check("models")])
        yield stage


def test_it_is_live_while_the_gate_is_shut(shut: Stage, tab: Tab, pictures: Path) -> None:
    tab.open(shut.url("/splint/"))
    tab.wait("document.body.innerText.includes('1 checks so far')")
    assert "smoke tests" in tab.ask("document.getElementById('phase').textContent")
    failed = [check("models"), check("kv_series", "failed", f"found {MARKUP}")]
    rundir.write_json(shut.run_dir / rundir.SMOKE_SO_FAR, failed)
    tab.wait("document.body.innerText.includes('2 checks so far')")
    tab.picture(pictures / "shut.png")
    shut.enter("serving")
    tab.wait("document.getElementById('phase').textContent == 'open for traffic'")


def test_what_a_report_says_is_never_taken_for_markup(shut: Stage, tab: Tab) -> None:
    rundir.write_json(shut.run_dir / rundir.SMOKE_SO_FAR, [check(MARKUP, "failed", MARKUP)])
    shut.after.readiness.put("processes", MARKUP)
    tab.open(shut.url("/splint/"))
    tab.wait("document.body.innerText.includes('onerror')")
    assert tab.ask("document.querySelectorAll('main img').length") == 0
    assert tab.ask("document.title") != "taken"


def test_a_process_that_is_gone_and_a_refused_patch_are_named_in_words(shut: Stage, tab: Tab) -> None:
    tab.open(shut.url("/splint/"))
    tab.wait("document.querySelector('table.matrix')")
    assert "is gone" in tab.text()
    refused = tab.ask("[...document.querySelectorAll('.matrix td .hidden-text')].map(cell => cell.textContent)")
    assert any(text.startswith("refused: ") for text in refused)


def test_a_server_that_goes_away_and_comes_back_is_noticed(tmp_path: Path, tab: Tab) -> None:
    with staged(Stage(tmp_path)) as stage:
        stage.enter("serving")
        tab.open(stage.url("/splint/"))
        tab.wait("document.getElementById('phase').textContent == 'open for traffic'")
        stage.server.should_exit = True
        tab.ask("look()")
        tab.wait("document.getElementById('phase').textContent == 'no answer'")


def test_the_key_is_asked_for_and_everything_is_reached_from_the_keyboard(
    tmp_path: Path, tab: Tab, pictures: Path
) -> None:
    with staged(Stage(tmp_path, KEY)) as stage:
        attest(tmp_path, 1, "api_server", rank=0)
        rundir.write_json(tmp_path / rundir.VERDICT, {
            "status": "passed", "level": "full", "seconds": 1.5, "finished_at": "", "checks": [check("models")],
        })  # fmt: skip
        stage.enter("serving")
        tab.open(stage.url("/splint/"))
        tab.wait("document.activeElement.id == 'key-input'")
        assert "api_server" not in tab.text()
        tab.write("guess")
        tab.press("Enter")
        tab.wait("document.getElementById('key-error').textContent")
        tab.picture(pictures / "key.png")
        tab.write(KEY)
        tab.press("Enter")
        tab.wait("document.body.innerText.includes('Smoke tests: passed')")
        assert KEY not in tab.ask("document.documentElement.outerHTML")
        assert tab.ask("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        reached = []
        for _ in range(12):
            tab.press("Tab")
            reached.append(tab.ask("document.activeElement.tagName + ' ' + (document.activeElement.ariaLabel ?? '')"))
            if reached[-1].startswith("SUMMARY") and not tab.ask("document.querySelector('details').open"):
                tab.press("Enter")
                tab.wait("document.querySelector('details').open")
        assert {"BUTTON ", "SUMMARY ", "DIV Smoke checks", "DIV Processes and patches"} <= set(reached), reached
        tab.ask("look()")
        assert tab.ask("document.querySelector('details').open"), "what was unfolded stays so"


def test_it_shows_the_main_job_in_light_and_dark_and_on_a_small_screen(stack: Server, tab: Tab, pictures: Path) -> None:
    tab.open("about:blank")  # what the page of an earlier test has said of its server's end comes with this answer
    tab.complaints.clear()
    for name, dark, width in (("light", False, 1280), ("dark", True, 1280), ("small", False, 400)):
        tab.open(stack.base_url + "/splint/", dark=dark, width=width)
        tab.wait("document.querySelector('table.matrix') && document.querySelectorAll('#smoke tbody tr').length")
        assert tab.ask("document.documentElement.scrollWidth <= window.innerWidth"), (
            f"{name}: the page scrolls sideways"
        )
        tab.picture(pictures / f"main-job-{name}.png")
    text = tab.text()
    for part in ("open for traffic", "kv_series", "DP1", "lmcache_identity", "fp8_e5m2", "kv1-", "dp coordinator"):
        assert part in text, part
    assert tab.complaints == []
    assert until(lambda: (pictures / "main-job-dark.png").stat().st_size > 20_000)
