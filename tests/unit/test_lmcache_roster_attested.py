"""What an engine makes of the words with which a server says who it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

import patches
from patches.framework import roster, tallies
from patches.framework.records import Role
from patches.lmcache_roster import attested

ALL = ("all",)
NAMES = [patch.id for patch in patches.catalogue() if Role.LMCACHE_SERVER in patch.roles]


def attestation(**changes: Any) -> dict[str, Any]:
    found = {
        "schema": roster.SCHEMA, "role": "lmcache_server", "dp_rank": None, "rank": None, "pid": 7, "start_time": 70,
        "host": "cache-0", "splint": "0.1.0", "mode": "enforce", "patch_set": "0" * 16, "libraries": {}, "facts": {},
        "plugin_verified": False, "missed": [], "timings_ms": {},
        "patches": [{"id": name, "state": "applied", "reason": ""} for name in (*NAMES, "kv_budget")],
    }  # fmt: skip
    return found | changes


def said(**changes: Any) -> dict[str, Any] | None:
    return attested.in_answer(["qstore", attested.word(attestation(**changes), {"a": 0, "b": 2}, {})])


def test_a_patched_server_is_read_back_and_protects() -> None:
    found = said()
    assert found is not None
    assert (found["pid"], found["host"], found["calls"]) == (7, "cache-0", {"b": 2})
    assert [each["id"] for each in found["patches"]] == NAMES
    assert attested.fault(found, ALL) is None


def test_a_stock_answer_has_no_attestation() -> None:
    assert attested.in_answer(["transfer_query", "kv_event_stream"]) is None
    assert attested.fault(None, ALL) == attested.STOCK


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps({"schema": roster.SCHEMA}),
        json.dumps(attestation(schema=roster.SCHEMA + 1)),
        json.dumps({**attestation(), "calls": {}, "tallies": {"lmcache_outages lost": "many"}}),
        json.dumps({**attestation(), "calls": {}, "tallies": {}, "patches": ["lmcache_admission"]}),
        json.dumps({**attestation(), "calls": {}, "tallies": {}, "role": "worker"}),
    ],
)
def test_what_cant_be_read_protects_nothing_and_raises_nothing(text: str) -> None:
    found = attested.in_answer([f"vllm-splint {text}"])
    assert found == {}
    assert "can't read" in (attested.fault(found, ALL) or "")


@pytest.mark.parametrize("mode", ["report", "off"])
def test_a_server_that_starts_without_needed_patches_does_not_protect(mode: str) -> None:
    assert f"SPLINT_MODE={mode}" in (attested.fault(said(mode=mode), ALL) or "")


@pytest.mark.parametrize("state", ["off", "refused", "inert"])
def test_a_patch_that_is_not_in_place_is_named_unless_the_engine_leaves_it_out_too(state: str) -> None:
    rows = [{"id": name, "state": "applied", "reason": ""} for name in NAMES if name != "lmcache_admission"]
    found = said(patches=[*rows, {"id": "lmcache_admission", "state": state, "reason": ""}])
    assert f"without lmcache_admission ({state})" in (attested.fault(found, ALL) or "")
    assert attested.fault(found, ("-lmcache_admission",)) is None


def test_a_patch_that_the_server_does_not_know_and_a_bare_target_are_named() -> None:
    found = said(patches=[{"id": name, "state": "applied", "reason": ""} for name in NAMES[1:]], missed=["m:f"])
    assert f"{NAMES[0]} (unknown there), m:f (bare)" in (attested.fault(found, ALL) or "")


def test_counts_of_metrics_that_this_release_lacks_are_left_out() -> None:
    counted = {"lmcache_misses damaged fs": 3, "lmcache_outages lost": 1, "lmcache_outages lost twice": 1, "new": 9}
    found = attested.in_answer([attested.word(attestation(), {}, counted)])
    assert found is not None
    assert found["tallies"] == {"lmcache_misses damaged fs": 3, "lmcache_outages lost": 1}
    assert tallies.total([found])["lmcache_misses"]["damaged", "fs"] == 3


def engine(seen: float, **server: Any) -> dict[str, Any]:
    fact = {"seen": seen, "answering": True, "fault": None, "accepted": False, "server": said(**server)}
    return {"pid": 1, "host": "engine-0", "start_time": 5, "alive": True, "facts": {roster.REMOTE: {"tcp://c:1": fact}}}


def test_a_server_that_several_engines_know_is_counted_once_with_the_last_word() -> None:
    found = roster.remote([engine(2.0, splint="new"), engine(1.0, splint="old")])
    assert [(each["splint"], each["alive"], each["url"]) for each in found] == [("new", True, "tcp://c:1")]


def test_a_server_that_attests_in_the_run_directory_is_not_counted_twice() -> None:
    here = {"pid": 7, "host": "cache-0", "start_time": 70, "alive": True, "facts": {}}
    assert roster.remote([here, engine(1.0)]) == []
