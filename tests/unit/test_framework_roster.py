"""The roster names whoever is missing, extra, bare or different."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import timeit
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patches.framework import counters, roster, rundir
from patches.framework.records import Role, Seam
from patches.process_roster import wrappers
from patches.supervision import SUPERVISOR_PID

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
    assert roster.compare(EXPECTED, attested) == ["engine_core DP0 has not attested: it runs without the patches"]


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


@pytest.mark.parametrize("bare", [0, 1])
def test_a_process_that_is_there_twice_is_named_whichever_of_them_is_bare(bare: int) -> None:
    """One of them once stood for both: the other, and what was wrong with it, went unseen."""
    twice = [entry(EXPECTED[2], pid=4711 + at, plugin_verified=at != bare) for at in range(2)]
    problems = roster.compare(EXPECTED, [*(entry(member) for member in EXPECTED[:2]), *twice])
    assert "worker DP0 rank 0 is there twice, as pid 4711 and pid 4712" in problems


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
    assert roster.compare(expected, attested) == []
    # Of three: a collection over all that other tests have left takes longer than this.
    spent = min(timeit.repeat(lambda: roster.compare(expected, attested), number=1, repeat=3))
    print(f"roster of 1,000 ranks compared in {spent * 1000:.1f} ms")
    assert spent < 0.5


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    rundir.write_json(path, {"phase": "smoke"})
    with pytest.raises(TypeError):
        rundir.write_json(path, {"phase": object()})
    assert json.loads(path.read_text()) == {"phase": "smoke"}
    assert [found.name for found in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("supervised", [False, True])
def test_api_servers_of_a_program_do_not_open_on_an_earlier_servers_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervised: bool
) -> None:
    """A supervising parent clears the folder itself, once, and before anybody writes to it."""
    rundir.prepare(tmp_path)
    monkeypatch.setenv(rundir.ENV, str(tmp_path))
    monkeypatch.delenv(SUPERVISOR_PID, raising=False)
    if supervised:
        monkeypatch.setenv(SUPERVISOR_PID, str(os.getppid()))
    left = [tmp_path / name for name in (rundir.PHASE, rundir.VERDICT, f"{rundir.HOLDS}1")]
    for path in left:
        path.write_text("{}")
    monkeypatch.setattr(
        "patches.framework.process.start", lambda: SimpleNamespace(take_role=lambda _role: None, note=lambda **_: None)
    )
    wrappers.launcher(Seam("x:y", lambda: None, lambda: None))()
    assert [path.exists() for path in left] == [supervised] * 3


@pytest.mark.parametrize("supervised", [False, True])
def test_a_headless_node_is_marked_as_one_until_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervised: bool
) -> None:
    """Its engines answer the control calls of its head, which tells them no phase."""
    monkeypatch.setenv(rundir.ENV, str(rundir.prepare(tmp_path)))
    monkeypatch.delenv(SUPERVISOR_PID, raising=False)
    if supervised:
        monkeypatch.setenv(SUPERVISOR_PID, str(os.getppid()))
    monkeypatch.setattr(
        "patches.framework.process.start", lambda: SimpleNamespace(take_role=lambda _role: None, note=lambda **_: None)
    )
    seen: list[bool] = []
    wrappers.headless(Seam("x:y", lambda: seen.append((tmp_path / rundir.HEADLESS).exists()), lambda: None))()
    rundir.forget_opening(tmp_path)
    assert (seen, (tmp_path / rundir.HEADLESS).exists()) == ([True], False)
