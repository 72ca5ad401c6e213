"""The main job: DP 2 + EP with an FP8 KV cache and LMCache, patched, proven, serving."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from support.fake_engine import PLAN
from support.servers import Server

from entrypoint.smoke.checks import CHECKS

ROLES = {
    ("api_server", None, 0),
    ("dp_coordinator", None, None),
    ("lmcache_server", None, None),
    ("engine_core", 0, None),
    ("engine_core", 1, None),
    ("worker", 0, 0),
    ("worker", 1, 0),
}


@pytest.fixture(scope="module")
def report(stack: Server) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(stack.base_url + "/splint/report").json()
    return answer


def test_the_smoke_tests_proved_the_whole_series_and_say_what_they_saw(report: dict[str, Any]) -> None:
    checks = {check["id"]: check for check in report["verdict"]["checks"]}
    for check in checks.values():
        shown = f"{check['reason']} {json.dumps(check['evidence'])[:400]}"
        print(f"{check['id']}: {check['status']} in {check['seconds']:.2f} s {shown}")
    assert report["verdict"]["status"] == "passed"
    passed = {name for name, check in checks.items() if check["status"] == "passed"}
    assert set(checks) == {check.id for check in CHECKS}
    assert passed >= set(checks) - {"pooling", "stop"}
    for engine in checks["kv_round_trip"]["evidence"]["engines"]:
        assert engine["connector"]["tokens"] == 256
    for engine in checks["attention"]["evidence"]["engines"]:
        assert engine["workers"][0]["layers"]
    assert isinstance(checks["kv_series"]["evidence"]["chunked"], float)


def test_the_smoke_tests_stay_within_their_budget(report: dict[str, Any]) -> None:
    """20 seconds, and 5 for what ``SPLINT_SMOKE=quick`` runs of them."""
    spent = {check["id"]: check["seconds"] for check in report["verdict"]["checks"]}
    quick = replace(PLAN, level="quick")
    left_out = {check.id for check in CHECKS if "SPLINT_SMOKE=quick" in (check.applies(quick) or "")}
    seconds = sum(spent[name] for name in spent.keys() - left_out)
    print(
        f"smoke tests: {report['verdict']['seconds']:.1f} s, of these quick {seconds:.1f} s without {sorted(left_out)}"
    )
    assert report["verdict"]["seconds"] <= 20
    assert left_out == {"parallel", "long_prompt", "kv_series"}
    assert seconds <= 5


def test_the_roster_is_complete_and_every_process_is_verified(report: dict[str, Any]) -> None:
    members = {(entry["role"], entry["dp_rank"], entry["rank"]): entry for entry in report["processes"]}
    assert set(members) == ROLES
    assert {entry["patch_set"] for entry in members.values()} == {report["processes"][0]["patch_set"]}
    for (role, _, _), entry in members.items():
        assert entry["alive"]
        assert entry["plugin_verified"] or role in ("dp_coordinator", "lmcache_server")


def test_the_patches_of_the_main_job_are_applied_and_exercised(report: dict[str, Any]) -> None:
    calls = {patch["id"]: patch["calls"] for patch in report["patches"]}
    print(f"calls by patch: {calls}")
    for name in (
        "cpu_expert_parallel",
        "lmcache_availability",
        "lmcache_identity",
        "kv_profile",
        "serving_gate",
        "process_roster",
    ):
        assert calls[name] > 0, name


def test_our_start_up_work_is_at_most_three_percent_of_the_time_to_healthy(
    stack: Server, report: dict[str, Any]
) -> None:
    """Summed over all processes, although they start side by side; LMCache's server is up before they are started."""
    ours = [entry["timings_ms"] for entry in report["processes"] if entry["role"] != "lmcache_server"]
    total = sum(sum(phases.values()) for phases in ours) / 1000
    print(f"start-up work of our own, ms by phase over {len(ours)} processes: {ours}")
    print(f"{total:.2f} s of {stack.ready_s:.1f} s to healthy: {100 * total / stack.ready_s:.2f} %")
    assert total <= 0.03 * stack.ready_s


def test_the_openai_sdk_chats_streams_and_reads_log_probabilities(stack: Server) -> None:
    with openai.OpenAI(base_url=stack.base_url + "/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "the quick brown fox"}]
        whole = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, temperature=0, logprobs=True
        )
        parts = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, temperature=0, stream=True
        )
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].logprobs is not None


def test_every_openai_client_sees_which_patches_its_answer_came_through(stack: Server, report: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=stack.base_url + "/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "tiny", "max_tokens": 2, "temperature": 0}
        messages: Any = [{"role": "user", "content": "the quick brown fox"}]
        answers = [
            client.chat.completions.create(messages=messages, **asked),
            client.completions.create(prompt="a", **asked),
            *client.chat.completions.create(messages=messages, stream=True, **asked),
        ]
    said = {answer.system_fingerprint for answer in answers if answer.system_fingerprint}
    print(f"system_fingerprint: {said}")
    assert len(said) == 1
    assert said.pop().endswith(report["processes"][0]["patch_set"])
    assert answers[-1].system_fingerprint or answers[-2].system_fingerprint, "a stream says it, too"


def test_metrics_say_what_the_server_is_at_the_moment(stack: Server) -> None:
    lines = httpx.get(stack.base_url + "/metrics").text.splitlines()
    assert "splint_ready 1.0" in lines
    assert sum(line.startswith("splint_process_up{") and line.endswith(" 1.0") for line in lines) == len(ROLES)
    assert sum(line.startswith("splint_patch_set_processes{") for line in lines) == 1
    assert any(line.startswith('splint_patch_calls_total{patch="lmcache_identity"}') for line in lines)


def test_metrics_name_every_patch_in_every_process(stack: Server) -> None:
    lines = httpx.get(stack.base_url + "/metrics").text.splitlines()
    info = [line for line in lines if line.startswith("splint_patch_info{") and 'patch="cpu_expert_parallel"' in line]
    assert {'role="worker"' in line and 'state="applied"' in line for line in info} >= {True}
    assert any(line.startswith("splint_smoke_check{") and 'check="kv_series"' in line for line in lines)


def test_splint_report_reads_the_running_server(stack: Server) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "entrypoint.cli", "report", "--base-url", stack.base_url],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    print(shown.stdout)
    assert shown.returncode == 0, shown.stderr
    for name in (
        "cpu_expert_parallel",
        "kv_series",
        "engine_core",
        "DP1: kv1-",
        "LMCache servers, as the engines know",
    ):
        assert name in shown.stdout


def test_the_report_shows_that_the_lmcache_server_is_a_patched_one(report: dict[str, Any]) -> None:
    """As the engines learned it over LMCache's protocol, and as the server says of itself in the shared folder."""
    (known,) = report["lmcache_servers"]
    (itself,) = (entry for entry in report["processes"] if entry["role"] == "lmcache_server")
    assert (known["answering"], known["fault"], known["accepted"]) == (True, None, False)
    names = ("host", "pid", "splint", "mode", "patch_set", "libraries")
    assert known["server"] == {name: itself[name] for name in names}


def test_both_ranks_answer_alike(stack: Server) -> None:
    def ask(rank: int) -> Any:
        body = {"model": "tiny", "prompt": list(range(20, 320)), "max_tokens": 8, "temperature": 0, "logprobs": 1}
        answer = httpx.post(
            stack.base_url + "/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}, timeout=60
        )
        return answer.json()["choices"][0]["logprobs"]["token_logprobs"]

    assert ask(0) == pytest.approx(ask(1), abs=1e-2)
