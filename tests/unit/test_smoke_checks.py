"""The checks against a small engine over real HTTP: an honest one passes, and each dishonesty is caught by name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import PLAN, SECRET, Engine, listening

from entrypoint.smoke import battery
from entrypoint.smoke.check import Check, Context
from entrypoint.smoke.checks import CHECKS
from entrypoint.smoke.server import Server
from patches.framework import rundir
from patches.serving_gate.plan import CheckResult

Run = Callable[..., dict[str, CheckResult]]


@pytest.fixture
def run() -> Run:
    """Run the battery, or the named checks, against ``engine``; returns the results by check."""

    def run(engine: Engine, *names: str, secret_passes: bool = True, **changes: Any) -> dict[str, CheckResult]:
        with listening(engine) as url:
            plan = replace(PLAN, **{"base_url": url, "dp_ranks": tuple(range(engine.ranks)), **changes})
            server = Server(plan)
            chosen = [check for check in CHECKS if not names or check.id in names]
            verdict = battery.run(Context(plan, server, secret_passes=secret_passes), chosen)
            server.close()
        return {result.id: result for result in verdict.checks}

    return run


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_honest_server_passes_every_check_that_applies(run: Run, ranks: int) -> None:
    results = run(Engine(ranks=ranks))
    assert {name: result.status for name, result in results.items()} == {
        "models": "passed", "roster": "skipped", "kv_budget": "skipped", "kv_round_trip": "skipped",
        "attention": "skipped", "chat": "passed", "stream": "passed", "logprobs": "passed", "stop": "passed",
        "parallel": "passed", "long_prompt": "passed", "pooling": "skipped", "dp_ranks": "passed",
        "kv_series": "passed", "lmcache": "skipped", "exercised": "skipped",
    }  # fmt: skip


def test_the_series_names_tokens_and_differences_by_rank(run: Run) -> None:
    evidence = run(Engine(), "kv_series")["kv_series"].evidence
    assert evidence["prefix_hit_tokens"] == {"0": 64, "1": 64}
    assert evidence["external_hit_tokens"] == {"0": 64, "1": 64}
    assert evidence["external_hit"] == {"0": 0.0, "1": 0.0}
    assert evidence["decode"] == {"0": 0.0, "1": 0.0}
    assert evidence["signal"] > evidence["tolerance"] > 0


def test_an_engine_that_is_wrong_by_chance_is_not_taken_for_a_noisy_one(run: Run) -> None:
    result = run(Engine(wrong_on="chance"), "kv_series")["kv_series"]
    assert (result.status, "Do not serve" in result.reason) == ("failed", True)


def test_a_model_that_ignores_its_prompt_is_not_said_to_have_been_compared(run: Run) -> None:
    result = run(Engine(ignores_prompt=True), "kv_series")["kv_series"]
    assert result.status == "skipped"
    assert "answers move by 0 nats when the cached tokens are others" in result.reason
    assert result.evidence["external_hit_tokens"] == {"0": 64, "1": 64}


@pytest.mark.parametrize("busy", [False, True])
def test_the_control_that_cuts_prefills_must_be_taken_back(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, busy: bool
) -> None:
    """An engine that stays busy keeps cutting: it must not be opened as if nothing were."""
    monkeypatch.setattr("entrypoint.smoke.server.COUNTED_WITHIN_S", 0.1)
    taken = {"dp_rank": 0, "chunk_tokens": 16}
    engine = Engine(
        ranks=1,
        answers={"prefill_in_blocks": [taken], "prefill_whole": [{"dp_rank": 0, "busy": True} if busy else taken]},
    )
    result = run(engine, "kv_series", features=("probed",), chunked_prefill=True)["kv_series"]
    assert result.status == ("failed" if busy else "passed"), result
    assert ("DP0 with requests that do not end" in result.reason) is busy


def test_a_late_store_is_waited_for_with_new_prompts(run: Run) -> None:
    result = run(Engine(stores_after=20), "kv_series")["kv_series"]
    assert result.status == "passed"
    assert result.evidence["external_attempts"] > 1


@pytest.mark.parametrize(
    ("changes", "part", "reason"),
    [
        ({"prefix_caching": False}, "prefix_hit", "prefix caching is off"),
        ({"connector": None, "connectors": (), "chunk_tokens": None}, "external_hit", "no KV connector"),
        (
            {"connector": "NixlConnector", "connectors": ("NixlConnector",), "chunk_tokens": None},
            "external_hit",
            "LMCache is not in the KV connector, NixlConnector",
        ),
        (
            {"connector": "LMCacheConnectorV1", "connectors": ("LMCacheConnectorV1",), "chunk_tokens": None},
            "external_hit",
            "LMCacheConnectorV1 keeps its chunks inside each engine",
        ),
        ({"chunk_tokens": None}, "external_hit", "lmcache_availability, which tells LMCache's chunk size, is left out"),
        ({"kv_role": "kv_producer"}, "external_hit", "kv_producer"),
        ({"chunk_tokens": 512}, "external_hit", "no room for an LMCache chunk of 512"),
    ],
)
def test_a_part_that_does_not_apply_says_why(run: Run, changes: dict[str, Any], part: str, reason: str) -> None:
    engine = Engine(
        keeps_prefixes=changes.get("prefix_caching", True), stores_after=0 if part == "prefix_hit" else 1000
    )
    result = run(engine, "kv_series", **changes)["kv_series"]
    assert result.status == "passed"
    assert reason in result.evidence[part]["skipped"]
    assert f"without {part}: {result.evidence[part]['skipped']}" in result.reason


def test_one_rank_from_outside_can_not_empty_its_prefix_cache(run: Run) -> None:
    result = run(Engine(ranks=1), "kv_series", secret_passes=False)["kv_series"]
    assert "closed gate" in result.evidence["external_hit"]["skipped"]


def test_a_head_with_one_rank_of_its_own_addresses_it_and_proves_that_the_other_nodes_ranks_answer(run: Run) -> None:
    """Its load balancer would send a request without an address to either node."""
    results = run(Engine(ranks=3, unaddressed=2), "dp_ranks", "kv_series", dp_ranks=(0,), other_ranks=(1, 2))
    assert {result.status for result in results.values()} == {"passed"}
    assert set(results["dp_ranks"].evidence["ranks"]) == {"0", "1", "2"}


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_without_counters_every_rank_is_asked_all_the_same_other_nodes_too(run: Run, runner: str) -> None:
    engine = Engine(ranks=3, counts=False)
    result = run(engine, "dp_ranks", dp_ranks=(0,), other_ranks=(1, 2), runner=runner)["dp_ranks"]
    assert result.status == "skipped"
    assert [engine.counters["request_success", rank] for rank in range(3)] == [1, 1, 1]


def test_log_probabilities_are_asked_of_every_rank_other_nodes_too(run: Run) -> None:
    asked = {"dp_ranks": (0,), "other_ranks": (1, 2)}
    assert set(run(Engine(ranks=3), "logprobs", **asked)["logprobs"].evidence["ranks"]) == {"0", "1", "2"}
    result = run(Engine(ranks=3, shifted_rank=2), "logprobs", **asked)["logprobs"]
    assert (result.status, "from DP rank 2" in result.reason) == ("failed", True)


def test_a_passed_check_says_each_reason_for_what_it_left_out_once() -> None:
    parts = [{"connector": {"skipped": "none is configured"}}, {"connector": {"skipped": "none is configured"}}]
    layers = {"rank": 0, "skipped": {"layer.3": "no reference for sinks"}}
    partial = Check("partial", "Most.", lambda _: None, lambda _: {"engines": parts, "workers": [layers], "rest": 1})
    (result,) = battery.run(Context(PLAN, Server(PLAN)), [partial]).checks
    wanted = "without connector: none is configured; without layer.3: no reference for sinks"
    assert (result.status, result.reason) == ("passed", wanted)


def test_a_rank_of_another_node_that_does_not_answer_is_caught(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.smoke.server.COUNTED_WITHIN_S", 0.1)
    result = run(Engine(other_rank=True), "dp_ranks", dp_ranks=(0,), other_ranks=(1,))["dp_ranks"]
    assert (result.status, "DP rank 1 counted 0 requests" in result.reason) == ("failed", True)


@pytest.mark.usefixtures("no_waiting")
def test_without_counters_answers_are_compared_all_the_same(run: Run) -> None:
    results = run(Engine(counts=False), "dp_ranks", "kv_series")
    assert (results["dp_ranks"].status, results["kv_series"].status) == ("skipped", "passed")
    assert "--disable-log-stats" in results["dp_ranks"].reason
    assert "--disable-log-stats" in results["kv_series"].evidence["hits"]


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("fault", ["prefix", "decode", "external"])
def test_wrong_caches_are_caught_without_counters(run: Run, fault: str) -> None:
    assert run(Engine(counts=False, wrong_on=fault), "kv_series")["kv_series"].status == "failed"


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.smoke.checks.kv_series.STORE_WAITS_S", (0.0, 1e-3))
    monkeypatch.setattr("entrypoint.smoke.checks.kv_series.UNCOUNTED_WAIT_S", 1e-3)


def test_a_battery_in_which_nothing_passed_has_failed() -> None:
    nothing = Check("nothing", "Nothing.", lambda _: "there is nothing to do", lambda _: {})
    verdict = battery.run(Context(PLAN, Server(PLAN)), [nothing])
    assert verdict.status == "failed"


def test_a_model_without_chat_template_is_served(run: Run) -> None:
    results = run(Engine(chat_template=False), "chat", "stream")
    assert {result.status for result in results.values()} == {"skipped"}
    assert "chat template" in results["chat"].reason


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_server_that_allows_fewer_alternatives_is_asked_for_fewer(run: Run, limit: int) -> None:
    results = run(Engine(max_logprobs=limit), "logprobs", "kv_series")
    assert {result.status for result in results.values()} == {"passed"}


def test_a_context_that_takes_too_long_to_fill_is_filled_in_part(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.smoke.checks.long_prompt.LONGEST", 256)
    monkeypatch.setattr("entrypoint.smoke.checks.long_prompt.FIRST", 128)
    result = run(Engine(takes_any_length=True), "long_prompt")["long_prompt"]
    assert (result.status, result.evidence["prompt_tokens"]) == ("passed", 256)
    assert "not asked" in result.evidence["beyond"]


def test_a_server_that_prefills_slowly_is_asked_for_less(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.smoke.checks.long_prompt.FIRST", 128)
    monkeypatch.setattr("entrypoint.smoke.checks.long_prompt.BUDGET_S", 1e-6)
    result = run(Engine(), "long_prompt")["long_prompt"]
    assert (result.status, result.evidence["prompt_tokens"]) == ("passed", 128)


def test_a_model_that_ignores_its_prompt_is_not_taken_for_a_mix_up_nor_for_its_absence(run: Run) -> None:
    result = run(Engine(ignores_prompt=True), "parallel")["parallel"]
    assert (result.status, "none could be told apart" in result.reason) == ("skipped", True)


def test_a_pooling_model_is_asked_to_pool_only(run: Run) -> None:
    results = run(Engine(), runner="pooling")
    assert {name for name, result in results.items() if result.status == "passed"} == {"models", "pooling", "dp_ranks"}
    assert results["pooling"].evidence["endpoint"] == "/pooling"


def test_a_rank_that_pools_nothing_is_caught(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.smoke.server.COUNTED_WITHIN_S", 0.1)
    result = run(Engine(other_rank=True), "dp_ranks", runner="pooling")["dp_ranks"]
    assert (result.status, result.evidence["moved"]) == ("failed", {"0": 8, "1": 0})


def test_quick_leaves_out_the_series_and_says_so(run: Run) -> None:
    result = run(Engine(), "kv_series", level="quick")["kv_series"]
    assert (result.status, result.reason) == ("skipped", "SPLINT_SMOKE=quick leaves it out")


def test_an_incomplete_roster_is_named() -> None:
    with listening(Engine()) as url:
        plan = replace(PLAN, base_url=url, expected_roster=({"role": "engine_core", "dp_rank": 1},))
        folder = Path("/nonexistent")
        roster = next(check for check in CHECKS if check.id == "roster")
        verdict = battery.run(Context(plan, Server(plan), folder), [roster])
    assert "engine_core DP1 has not attested" in verdict.checks[0].reason


def budget_check(folder: Path, *said: dict[str, Any] | None) -> CheckResult:
    """The verdict on engine cores that say this of their budget, one after the other."""
    rundir.prepare(folder)
    for dp_rank, facts in enumerate(said):
        entry = {"role": "engine_core", "dp_rank": dp_rank, "seams": [], "start_time": None, "pid": dp_rank}
        told = {} if facts is None else {"kv_budget": facts}
        rundir.write_json(folder / rundir.ROSTER / f"{dp_rank}.json", {**entry, "facts": told})
    plan = replace(PLAN, expected_roster=({"role": "engine_core"},))
    check = next(check for check in CHECKS if check.id == "kv_budget")
    (result,) = battery.run(Context(plan, Server(plan), folder), [check]).checks
    return result


def agreed(dp_rank: int, blocks: int, **more: Any) -> dict[str, Any]:
    return {"applies": True, "policy": "align", "own": [{"dp_rank": dp_rank, "blocks": blocks}], **more}


ROWS = [{"dp_rank": rank, "blocks": 90} for rank in range(3)]


def test_equal_budgets_pass_with_the_ranks_of_other_nodes(tmp_path: Path) -> None:
    result = budget_check(tmp_path, agreed(0, 90, ranks=ROWS), agreed(1, 90))
    assert (result.status, result.evidence["blocks"]) == ("passed", {"DP0": 90, "DP1": 90, "DP2": 90})


def test_a_rank_that_allocated_otherwise_is_named(tmp_path: Path) -> None:
    result = budget_check(tmp_path, agreed(0, 90, ranks=ROWS), agreed(1, 89))
    assert result.status == "failed"
    assert "'DP1': 89" in result.reason


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (None, "carries the kv_budget patch"),
        ({"applies": False, "reason": "one engine", "own": [{"dp_rank": 0, "blocks": 9}]}, "one engine"),
        (agreed(0, 90, policy="report"), "SPLINT_KV_BUDGET=report"),
    ],
)
def test_where_no_budget_was_agreed_the_check_says_why(
    tmp_path: Path, said: dict[str, Any] | None, reason: str
) -> None:
    result = budget_check(tmp_path, said)
    assert (result.status, reason in result.reason) == ("skipped", True)


def test_a_check_that_hangs_is_left_behind_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(battery, "MIN_SHARE_S", 0.05)
    released = threading.Event()
    hangs = Check("hangs", "Nothing.", lambda _: None, lambda _: {"released": released.wait(60)}, share=0.0)
    verdict = battery.run(Context(PLAN, Server(PLAN)), [hangs])
    released.set()
    assert (verdict.status, verdict.seconds < 30) == ("failed", True)
    assert "no result after" in verdict.checks[0].reason


def test_a_server_that_is_gone_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.smoke.checks.models.LISTEN_TIMEOUT_S", 0.1)
    plan = replace(PLAN, base_url="http://127.0.0.1:1")
    verdict = battery.run(Context(plan, Server(plan)), CHECKS[:1])
    assert "found no answer" in verdict.checks[0].reason


def test_the_secret_is_in_no_verdict(run: Run) -> None:
    results = run(Engine(wrong_on="prefix"))
    assert SECRET not in json.dumps([(result.reason, result.evidence) for result in results.values()])
