"""Every smoke check alone, the others off, against a server that is dishonest in its matter only: it is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import PLAN, Engine, listening

from entrypoint.smoke import battery
from entrypoint.smoke.check import Context
from entrypoint.smoke.checks import CHECKS
from entrypoint.smoke.server import Server
from patches.framework import rundir
from patches.serving_gate.plan import CheckResult

PROBED = {"features": ("probed",)}
SIZES = {"bytes_written": 1, "bytes_per_token": 512.0, "bytes_per_token_wanted": 512.0, "said_by": "KVCacheProfile"}
SKIPPED = {"skipped": "no KV connector is configured"}


def engine_core(dp_rank: int, blocks: int = 90, **calls: int) -> dict[str, Any]:
    """An attestation as engine cores write it."""
    return {
        "role": "engine_core", "dp_rank": dp_rank, "rank": None, "seams": list(calls), "pid": 0, "start_time": 0,
        "facts": {"kv_budget": {"applies": True, "policy": "align", "own": [{"dp_rank": dp_rank, "blocks": blocks}]}},
        "patches": [{"id": "kv_budget", "state": "applied", "reason": ""}],
    }  # fmt: skip


@dataclass(frozen=True)
class Sabotage:
    """A dishonest server, and what the verdict must say of it."""

    words: str
    engine: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    attested: tuple[dict[str, Any], ...] = ()


def probed(name: str, *engines: dict[str, Any], **plan: Any) -> dict[str, Any]:
    return {"engine": {"answers": {name: list(engines)}}, "plan": PROBED | plan}


def bytes_of(dp_rank: int, differing: dict[str, int]) -> dict[str, Any]:
    return {"dp_rank": dp_rank, "workers": [{"rank": 0, "differing": differing, **SIZES}], "connector": SKIPPED}


NOTHING: dict[str, Any] = {"skipped": {}, "broken": {}}


def broken(dp_rank: int) -> dict[str, Any]:
    error = {"layer.0": "TypeError in CPU_ATTN: no"}
    return {"dp_rank": dp_rank, "workers": [{"rank": 0, "layers": {}, **NOTHING, "broken": error}]}


def tried(dp_rank: int, share: float) -> dict[str, Any]:
    found = {"error": share * 0.01, "bound": 0.01, "share_of_bound": share}
    return {"dp_rank": dp_rank, "workers": [{"rank": 0, "layers": {"layer.0": {"decode": found}}, **NOTHING}]}


def connected(dp_rank: int, healthy: bool) -> dict[str, Any]:
    side = {"connector": "LMCacheMPConnector", "healthy": True}
    worker = {**side, "rank": 0, "healthy": healthy, "registered_layers": 2}
    return {"dp_rank": dp_rank, "scheduler": side, "workers": [worker]}


ROSTER = {"expected_roster": ({"role": "engine_core", "dp_rank": 1},)}

SABOTAGES: dict[str, list[Sabotage]] = {
    "models": [Sabotage("found the models other; wanted tiny among them", {"names": ("other",)})],
    "roster": [Sabotage("engine_core DP1 has not attested: it runs without the patches", plan=ROSTER)],
    "kv_budget": [
        Sabotage("KV blocks by rank: {'DP0': 90, 'DP1': 89}", {}, ROSTER, (engine_core(0), engine_core(1, blocks=89)))
    ],
    "kv_round_trip": [
        Sabotage("3 differing bytes in 1 layers of DP1 rank 0, first in layer.0, written and read back",
                 **probed("kv_round_trip", bytes_of(0, {}), bytes_of(1, {"layer.0": 3}))),
    ],
    "attention": [
        Sabotage("layer.0 of DP1 rank 0 0.02 away from the float32 reference (decode); wanted 0.01 at most",
                 **probed("attention", tried(0, 0.3), tried(1, 2.0))),
        Sabotage("no answer of layer.0 of DP1 rank 0 (TypeError in CPU_ATTN: no)",
                 **probed("attention", tried(0, 0.3), broken(1))),
        Sabotage("layer.0 of DP1 rank 0 nan away", **probed("attention", tried(0, 0.3), tried(1, float("nan")))),
    ],
    "chat": [
        Sabotage("found an empty answer; wanted at least one token", {"silent": True}),
        Sabotage("usage [4, 3, 7] for 2 generated tokens", {"miscounts": True}),
    ],
    "stream": [Sabotage("found the streamed text 'one tow'", {"broken_stream": True})],
    "logprobs": [
        Sabotage("wanted finite numbers, none above 0", {"logprob_shift": 10.0}),
        Sabotage("log-probabilities between nan and nan", {"logprob_shift": float("nan")}),
    ],
    "stop": [Sabotage("with finish_reason 'length' for the stop string", {"ignores_stop": True})],
    "parallel": [Sabotage("Answers are mixed up or wrong under load", {"mixes_up": True})],
    "long_prompt": [
        Sabotage("100 prompt tokens and 1 of the answer counted for a prompt of 511", {"cuts_prompts_at": 100}),
        Sabotage("an answer to a prompt of 513 tokens; wanted status 400", {"takes_any_length": True}),
        Sabotage("log-probabilities [nan] after 511 tokens", {"nan_after": 500}),
        Sabotage("log-probabilities [] after 511 tokens; wanted one", {"forgets_logprobs": True}),
    ],
    "pooling": [Sabotage("1 of 4 numbers not finite from /pooling", {"wrong_on": "pooling"}, {"runner": "pooling"})],
    "dp_ranks": [Sabotage("DP rank 1 counted 0 requests and 0 prompt tokens", {"other_rank": True})],
    "kv_series": [
        Sabotage("away from the recomputed ones (prefix_hit on DP rank 0)", {"wrong_on": "prefix"}),
        Sabotage("away from the recomputed ones (external_hit on DP rank", {"wrong_on": "external"}),
        Sabotage("away from the recomputed ones (the last decoded step on DP rank 0)", {"wrong_on": "decode"}),
        Sabotage("for a random prompt that was never sent before", {"invents_hits": True}),
        Sabotage("0 tokens from the prefix cache of DP rank 0", {"keeps_prefixes": False, "stores_after": 1000}),
        Sabotage("} tokens from LMCache by DP rank, in 2 tries", {"stores_after": 1000}),
    ],
    "lmcache": [
        Sabotage("a degraded LMCache connector in DP1 rank 0",
                 **probed("lmcache", connected(0, healthy=True), connected(1, healthy=False),
                          connector="MultiConnector", connectors=("MultiConnector", "LMCacheMPConnector"))),
        Sabotage("a degraded LMCache connector in DP1 rank 0",
                 **probed("lmcache", connected(0, healthy=True), connected(1, healthy=False))),
    ],
    "exercised": [
        Sabotage("kv_budget: EngineCore.__init__ in engine_core DP1", {}, ROSTER, (engine_core(1),)),
    ],
}  # fmt: skip

CASES = [pytest.param(name, sabotage, id=f"{name}-{at}") for name, many in SABOTAGES.items()
         for at, sabotage in enumerate(many)]  # fmt: skip


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Sabotage], CheckResult]:
    """Run one check and no other against the sabotaged server."""
    monkeypatch.setattr("entrypoint.smoke.checks.kv_series.STORE_WAITS_S", (0.0, 0.01))
    monkeypatch.setattr("entrypoint.smoke.server.COUNTED_WITHIN_S", 0.1)
    monkeypatch.setattr("entrypoint.smoke.checks.exercised.STARTED_WITHIN_S", 0.1)
    monkeypatch.setattr("patches.framework.roster.start_time", lambda _pid: 0)

    def alone(name: str, sabotage: Sabotage) -> CheckResult:
        rundir.prepare(tmp_path)
        for at, entry in enumerate(sabotage.attested):
            rundir.write_json(tmp_path / rundir.ROSTER / f"{at}.json", entry)
        with listening(Engine(**sabotage.engine)) as url:
            plan = replace(PLAN, base_url=url, **sabotage.plan)
            server = Server(plan)
            check = next(check for check in CHECKS if check.id == name)
            (result,) = battery.run(Context(plan, server, tmp_path), [check]).checks
            server.close()
        return result

    return alone


@pytest.mark.parametrize(("name", "sabotage"), CASES)
def test_a_check_alone_catches_its_sabotage(
    alone: Callable[[str, Sabotage], CheckResult], name: str, sabotage: Sabotage
) -> None:
    result = alone(name, sabotage)
    assert result.status == "failed", result
    assert sabotage.words in result.reason


def test_every_check_has_a_sabotage() -> None:
    assert set(SABOTAGES) == {check.id for check in CHECKS}
