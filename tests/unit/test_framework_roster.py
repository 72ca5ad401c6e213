"""The roster names whoever is missing, extra, bare or different."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework import counters, process, roster, rundir
from patches.framework.errors import RosterError
from patches.framework.records import Role, Seam
from patches.process_roster.wrappers import engine_core_proc

EXPECTED = (
    {"role": "api_server", "dp_rank": None, "rank": 0},
    {"role": "engine_core", "dp_rank": 0, "rank": None},
    {"role": "worker", "dp_rank": 0, "rank": 0},
)


def entry(expected: dict[str, Any], **changes: Any) -> dict[str, Any]:
    found = {
        **expected,
        "pid": 1,
        "alive": True,
        "plugin_verified": True,
        "patch_set": "abc",
        "mode": "enforce",
        "libraries": {"vllm": "0.32.0"},
        "missed": [],
        "patches": [{"id": "process_roster", "state": "applied", "reason": ""}],
    }
    return found | changes


def test_a_complete_roster_has_no_problems() -> None:
    assert roster.compare(EXPECTED, [entry(member) for member in EXPECTED]) == []


def test_a_missing_process_is_named() -> None:
    problems = roster.compare(EXPECTED, [entry(member) for member in EXPECTED[:2]])
    assert problems == ["worker DP0 rank 0 has not attested: it runs without the patches"]


def test_a_dead_process_counts_as_missing() -> None:
    attested = [entry(EXPECTED[0]), entry(EXPECTED[1], alive=False), entry(EXPECTED[2])]
    assert roster.compare(EXPECTED, attested) == ["engine_core DP0 (pid 1) has attested and is gone"]


CACHE = {"role": "lmcache_server", "dp_rank": None, "rank": None}


def test_an_lmcache_server_of_this_run_directory_is_expected_like_the_others() -> None:
    members = [entry(member) for member in EXPECTED]
    assert roster.compare(EXPECTED, [*members, entry(CACHE)]) == []
    assert roster.compare(EXPECTED, [*members, entry(CACHE, alive=False)]) == [
        "lmcache_server (pid 1) has attested and is gone"
    ]
    restarted = [entry(CACHE, alive=False), entry(CACHE, pid=2)]
    assert roster.compare(EXPECTED, [*members, *restarted]) == []
    (problem,) = roster.compare(EXPECTED, [*members, entry(CACHE, patch_set="other")])
    assert "lmcache_server" in problem or "other" in problem


def test_a_stranger_is_named_but_an_lmcache_server_may_be_there() -> None:
    stranger = entry({"role": "worker", "dp_rank": 7, "rank": 0})
    cache = entry({"role": "lmcache_server", "dp_rank": None, "rank": None}, plugin_verified=False)
    attested = [*(entry(member) for member in EXPECTED), stranger, cache]
    assert roster.compare(EXPECTED, attested) == ["worker DP7 rank 0 is not part of this server"]


def test_a_process_whose_plugin_did_not_run_is_named_with_the_remedy() -> None:
    attested = [*(entry(member) for member in EXPECTED[:2]), entry(EXPECTED[2], plugin_verified=False)]
    (problem,) = roster.compare(EXPECTED, attested)
    assert "worker DP0 rank 0" in problem
    assert "VLLM_PLUGINS" in problem


@pytest.mark.parametrize(
    "changes",
    [{"patches": [{"id": "process_roster", "state": "refused", "reason": "source"}]}, {"missed": ["source"]}],
)
def test_a_patch_that_is_not_in_place_is_named(changes: dict[str, Any]) -> None:
    bare = entry(EXPECTED[2], **changes)
    (problem,) = roster.compare(EXPECTED, [*(entry(member) for member in EXPECTED[:2]), bare])
    assert "worker DP0 rank 0" in problem
    assert "source" in problem


@pytest.mark.parametrize("field", ["patch_set", "mode", "libraries"])
def test_members_that_differ_are_named(field: str) -> None:
    attested = [*(entry(member) for member in EXPECTED[:2]), entry(EXPECTED[2], **{field: "other"})]
    (problem,) = roster.compare(EXPECTED, attested)
    assert f"worker DP0 rank 0: {field} is other" in problem


def test_call_counters_are_read_while_another_process_counts(tmp_path: Path) -> None:
    path = tmp_path / "one.calls"
    code = (
        "import sys; from pathlib import Path; from patches.framework.counters import Counters\n"
        "c = Counters(); first = c.add('first'); second = c.add('second'); first()\n"
        "c.share(Path(sys.argv[1])); second(); second(); print('counted', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        assert counters.read(path, ("first", "second")) == {"first": 1, "second": 2}
        child.stdin.close()


def test_counters_that_are_not_there_yet_read_as_zero(tmp_path: Path) -> None:
    assert counters.read(tmp_path / "none", ("a",)) == {"a": 0}


def test_more_seams_than_slots_is_an_error() -> None:
    table = counters.Counters()
    for number in range(counters.CAPACITY):
        table.add(str(number))
    with pytest.raises(OverflowError):
        table.add("one too many")


def test_an_attestation_of_an_ended_process_is_not_alive(tmp_path: Path) -> None:
    rundir.prepare(tmp_path)
    content: dict[str, Any] = {
        "pid": os.getpid(),
        "start_time": roster.start_time(os.getpid()),
        "seams": [],
        "role": "worker",
    }
    rundir.write_json(tmp_path / rundir.ROSTER / "1.json", content)
    rundir.write_json(tmp_path / rundir.ROSTER / "2.json", content | {"start_time": 1})
    assert [found["alive"] for found in roster.load(tmp_path)] == [True, False]


def test_a_roster_of_a_thousand_ranks_is_compared_in_well_under_a_second() -> None:
    expected = [{"role": Role.WORKER.value, "dp_rank": rank, "rank": 0} for rank in range(1000)]
    attested = [entry(member) for member in expected]
    start = time.perf_counter()
    assert roster.compare(expected, attested) == []
    spent = time.perf_counter() - start
    print(f"roster of 1,000 ranks compared in {spent * 1000:.1f} ms")
    assert spent < 0.5


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    rundir.write_json(path, {"phase": "smoke"})
    with pytest.raises(TypeError):
        rundir.write_json(path, {"phase": object()})
    assert json.loads(path.read_text()) == {"phase": "smoke"}
    assert [found.name for found in tmp_path.iterdir()] == ["state.json"]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A headless node's run directory with an engine core (this process, DP1), its two workers, and another rank's."""
    monkeypatch.setenv(rundir.ENV, str(rundir.prepare(tmp_path)))
    state = SimpleNamespace(identity={"role": "engine_core", "dp_rank": 1, "rank": None}, refuse=refuse)
    monkeypatch.setattr(process, "start", lambda: state)
    attest(tmp_path, "engine_core", None)
    attest(tmp_path, "worker", 0)
    attest(tmp_path, "worker", 1)
    attest(tmp_path, "worker", 7, dp_rank=0, patch_set="of a neighbour")
    return tmp_path


def refuse(error: RosterError) -> None:
    raise error


def attest(run_dir: Path, role: str, rank: int | None, **changes: Any) -> None:
    member: dict[str, Any] = {"role": role, "dp_rank": 1, "rank": rank}
    found = entry(member, start_time=roster.start_time(os.getpid()), seams=[]) | changes
    rundir.write_json(run_dir / rundir.ROSTER / f"{role}{rank}.json", {**found, "pid": os.getpid()})


def start_engine() -> None:
    parallel = SimpleNamespace(distributed_executor_backend="mp", local_world_size=2)
    engine_core_proc(Seam("x", lambda *_: None, lambda: None))(None, SimpleNamespace(parallel_config=parallel))


def test_an_engine_with_its_workers_starts_on_a_node_without_a_gate(node: Path) -> None:
    assert len(list((node / rundir.ROSTER).glob("*.json"))) == 4
    start_engine()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"patch_set": "other"}, "worker DP1 rank 1: patch_set is other"),
        ({"start_time": 1}, r"worker DP1 rank 1 \(pid \d+\) has attested and is gone"),
        ({"plugin_verified": False}, "worker DP1 rank 1 .*VLLM_PLUGINS"),
        ({"dp_rank": 5}, "worker DP1 rank 1 has not attested"),
    ],
)
def test_an_engine_refuses_to_start_with_a_worker_that_is_missing_or_different(
    node: Path, changes: dict[str, Any], said: str
) -> None:
    attest(node, "worker", 1, **changes)
    with pytest.raises(RosterError, match=said):
        start_engine()
