"""Report and page: for those who have the key, without secrets and paths, also while the gate is shut."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.gate_stage import Stage, staged

from entrypoint import report as reports
from patches.framework import roster, rundir
from patches.framework.errors import SplintError
from patches.framework.redaction import Redaction, secrets_of
from patches.serving_gate.access import Access, api_keys
from patches.serving_gate.page import page

KEY = "the-key-of-this-server"
SECRET = "hunter2hunter2"
HOME = "/root/private/models/tiny"


def attest(run_dir: Path, **changes: Any) -> None:
    entry = {
        "role": "worker", "dp_rank": 0, "rank": 0, "pid": os.getpid(), "patch_set": "abc", "splint": "0.1.0",
        "start_time": roster.start_time(os.getpid()), "mode": "enforce", "seams": [], "libraries": {"vllm": "0.32.0"},
        "patches": [{"id": "kv_budget", "state": "refused", "reason": f"{HOME}/core.py differs"}], "timings_ms": {},
        "facts": {"note": f"opened with {SECRET}", "kv_cache_dtype": "auto"},
    }  # fmt: skip
    rundir.write_json(run_dir / rundir.ROSTER / "1.json", entry | changes)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with staged(Stage(tmp_path, KEY)) as stage:
        attest(tmp_path)
        reason = f"found {HOME} and Bearer {KEY}; wanted /v1/models"
        check = {"id": "models", "proves": "x", "status": "failed", "seconds": 0.1, "reason": reason, "evidence": {}}
        rundir.write_json(tmp_path / rundir.SMOKE_SO_FAR, [check])
        yield stage


def get(stage: Stage, path: str, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.get(stage.url(path), headers=headers, trust_env=False)


@pytest.mark.parametrize(("phase", "status"), [("smoke", 503), ("failed", 503), ("serving", 200), ("draining", 503)])
def test_the_report_is_shown_in_every_phase_to_those_who_have_the_key(stage: Stage, phase: str, status: int) -> None:
    stage.enter(phase)
    answer = get(stage, "/splint/report", KEY)
    assert (answer.status_code, answer.json()["phase"]) == (status, phase)
    assert answer.json()["processes"][0]["role"] == "worker"
    assert ("error" in answer.json()) == (status == 503)


@pytest.mark.parametrize("key", [None, "guess", KEY[:-1]])
@pytest.mark.parametrize("phase", ["smoke", "serving"])
def test_without_the_key_nothing_but_the_phase_is_told(stage: Stage, phase: str, key: str | None) -> None:
    stage.enter(phase)
    answer = get(stage, "/splint/report", key)
    assert answer.status_code == 401
    assert set(answer.json()) == {"phase", "seconds", "error"}


def test_the_probes_and_the_empty_page_need_no_key(stage: Stage) -> None:
    stage.enter("serving")
    paths = ("/livez", "/readyz", "/startupz", "/splint/")
    assert [get(stage, path).status_code for path in paths] == [200] * 4
    assert httpx.get(stage.url("/splint"), follow_redirects=True, trust_env=False).text == page().html.decode()


def test_no_secret_and_no_path_of_the_host_leaves_with_report_page_or_probe(stage: Stage, tmp_path: Path) -> None:
    stage.after.readiness.put("processes", f"gone: {HOME} of {SECRET}")
    stage.enter("serving")
    told = [get(stage, path, KEY) for path in ("/splint/report", "/splint/", "/readyz", "/livez", "/startupz")]
    everything = "\n".join(f"{answer.headers}\n{answer.text}" for answer in told)
    for hidden in (KEY, SECRET, HOME, "private", str(tmp_path)):
        assert hidden not in everything, hidden
    report = told[0].json()
    assert report["smoke_so_far"][0]["reason"] == "found …/tiny and Bearer [secret]; wanted /v1/models"
    assert report["processes"][0]["patches"][0]["reason"] == "…/core.py differs"


def test_what_was_planted_is_there_to_be_hidden(tmp_path: Path) -> None:
    """The grep of the test above would not notice a report that lost these parts."""
    attest(rundir.prepare(tmp_path))
    (entry,) = roster.load(tmp_path)
    assert SECRET in entry["facts"]["note"]
    assert HOME in entry["patches"][0]["reason"]


def test_only_reading_passes_a_shut_gate(stage: Stage) -> None:
    assert httpx.post(stage.url("/splint/report"), trust_env=False).status_code == 503
    assert get(stage, "/splint/report/x").status_code == 503
    assert get(stage, "/health").status_code == 503
    assert get(stage, "/splint/").status_code == 503


def test_splint_report_takes_the_key(stage: Stage) -> None:
    stage.enter("serving")
    address = stage.url("")
    assert reports.fetch(address, KEY)["phase"] == "serving"
    with pytest.raises(SplintError, match="VLLM_API_KEY"):
        reports.fetch(address)


@pytest.mark.parametrize(
    ("given", "environ", "keys"),
    [(["a", "b"], "c", ["a", "b"]), (None, "c", ["c"]), ([], "c", ["c"]), (None, None, []), ([""], None, [])],
)
def test_the_keys_are_those_that_vllm_takes(
    monkeypatch: pytest.MonkeyPatch, given: list[str] | None, environ: str | None, keys: list[str]
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if environ:
        monkeypatch.setenv("VLLM_API_KEY", environ)
    assert api_keys(SimpleNamespace(api_key=given)) == keys


@pytest.mark.parametrize(
    ("authorization", "allowed"),
    [("Bearer second", True), ("bearer first", True), ("Basic first", False), ("first", False), (None, False)],
)
def test_any_of_the_keys_opens_in_the_bearer_form_alone(authorization: str | None, allowed: bool) -> None:
    assert Access(["first", "second"]).allows(authorization) is allowed
    assert Access([]).allows(authorization)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("see /tmp/a/b.json, or /srv", "see …/b.json, or …/srv"),
        ("GET /v1/models and /metrics: 503", "GET /v1/models and /metrics: 503"),
        ("http://127.0.0.1:8000/tmp/x", "http://127.0.0.1:8000/tmp/x"),
        ("redis://user:secret@cache:6379", "redis://[secret]@cache:6379"),
        ("hf_abcdefghijkl and sk-abcdefghijkl", "[secret] and [secret]"),
        ("12/34 tokens, 3 blocks/s, and/or", "12/34 tokens, 3 blocks/s, and/or"),
        ("kv1-0123456789ab commit:abc/def", "kv1-0123456789ab commit:abc/def"),
        ("'/tmp/quoted' (/srv/x)", "'…/quoted' (…/x)"),
        ("unix:/tmp/a/b, /srv/a:/srv/b/c", "unix:…/b, …/a:…/c"),
        ("ipc:///tmp/a/b and file:///srv/x/y", "ipc://…/b and file://…/y"),
        ("http://srv/tmp/x, commit:/abc/def", "http://srv/tmp/x, commit:/abc/def"),
    ],
)
def test_paths_and_forms_of_secrets(text: str, clean: str) -> None:
    assert Redaction([], folders=["tmp", "srv"]).clean({text: [text]}) == {clean: [clean]}


def test_secrets_are_known_by_the_names_of_their_variables() -> None:
    secrets = {"HF_TOKEN": "0123456789a", "AWS_SECRET_ACCESS_KEY": "b" * 12, "openai_api_key": "d" * 9}
    others = {"TOKENIZERS_PARALLELISM": "x" * 12, "MAX_TOKENS": "y" * 12, "KEYBOARD": "z" * 12}
    too_little = {"SHORT_KEY": "abc", "PORT_KEY": "123456789"}
    assert set(secrets_of(secrets | others | too_little)) == set(secrets.values())


def test_the_page_runs_its_own_script_and_style_and_loads_nothing() -> None:
    html = page().html.decode()
    for element in ("script", "style"):
        content = re.findall(rf"<{element}>(.*?)</{element}>", html, re.DOTALL)[0].encode()
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in page().policy
    assert page().policy.startswith("default-src 'none'; connect-src 'self'")
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", html), "no external assets"
    assert "innerHTML" not in html, "what a report says is never taken for markup"
