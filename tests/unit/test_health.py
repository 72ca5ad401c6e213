"""`splint health` on run directories of this test's own processes, and on one that a real supervising parent keeps."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from entrypoint import health, report
from patches.framework import rundir
from patches.supervision import living, processes

ROOT = Path(__file__).parents[2]


def started(pid: int) -> int:
    state = processes.read_state(pid)
    assert state is not None
    return state.started


class Server:
    """A run directory whose supervising parent and members are this process, until a test says otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = rundir.prepare(folder)
        self.supervise()

    def supervise(self, **other: Any) -> None:
        own = {"pid": os.getpid(), "started": started(os.getpid()), "gated": True}
        rundir.write_json(self.folder / living.SUPERVISOR, own | other)

    def phase(self, name: str) -> None:
        rundir.write_json(self.folder / rundir.PHASE, {"phase": name})

    def attest(self, role: str, **other: Any) -> None:
        entry = {"role": role, "pid": os.getpid(), "start_time": started(os.getpid()), "mode": "enforce",
                 "plugin_verified": True, "facts": {"kv_budget": {}},
                 "patches": [{"id": "kv_budget", "state": "applied"}], **other}  # fmt: skip
        name = f"{role}-{other.get('dp_rank')}-{other.get('rank')}.json"
        rundir.write_json(self.folder / rundir.ROSTER / name, entry)

    @property
    def health(self) -> health.Health:
        return health.health(self.folder)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


@pytest.fixture
def gone() -> int:
    """The pid of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    return ended.pid


def test_a_server_that_serves_is_healthy(server: Server) -> None:
    server.attest("api_server", rank=0)
    server.attest("engine_core", dp_rank=0)
    server.phase("serving")
    assert server.health == health.Health(True, "serving, 2 processes alive")


@pytest.mark.parametrize("phase", ["smoke", "failed", "draining", "engine dead"])
def test_every_other_phase_is_unhealthy_by_its_name(server: Server, phase: str) -> None:
    server.attest("engine_core", dp_rank=0)
    server.phase(phase)
    assert server.health == health.Health(False, f"phase {phase}")


def test_a_server_whose_gate_has_not_spoken_yet_is_loading(server: Server) -> None:
    server.attest("engine_core", dp_rank=0)
    assert server.health == health.Health(False, "phase loading")


@pytest.mark.parametrize("role", ["api_server", "engine_core", "worker", "dp_coordinator"])
def test_a_lost_process_of_an_open_server_is_named(server: Server, gone: int, role: str) -> None:
    server.phase("serving")
    server.attest(role, dp_rank=1, pid=gone)
    assert server.health == health.Health(False, f"{role} DP1 has ended")


def test_another_process_with_the_pid_of_a_lost_one_does_not_hide_the_loss(server: Server) -> None:
    server.phase("serving")
    server.attest("worker", dp_rank=1, rank=0, start_time=1)
    assert server.health == health.Health(False, "worker DP1 rank 0 has ended")


def test_a_process_that_ended_and_was_not_collected_yet_is_lost(server: Server) -> None:
    server.phase("serving")
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        server.attest("worker", dp_rank=0, rank=1, pid=child.pid, start_time=started(child.pid))
        assert server.health.healthy
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert server.health == health.Health(False, "worker DP0 rank 1 has ended")


def test_a_lost_lmcache_server_costs_hits_not_health(server: Server, gone: int) -> None:
    server.phase("serving")
    server.attest("lmcache_server", pid=gone)
    assert server.health.healthy


def test_a_refusal_is_the_reason_even_where_a_phase_says_otherwise(server: Server) -> None:
    server.phase("serving")
    told = {"found": "vllm.x:f differs", "wanted": "w", "remedy": "r"}
    rundir.write_json(server.folder / rundir.REFUSED / "1.json", told)
    assert server.health == health.Health(False, "refused to serve: vllm.x:f differs")


def test_a_headless_node_is_healthy_when_its_engines_are_proven_and_have_their_kv_caches(server: Server) -> None:
    server.supervise(gated=False)
    assert server.health == health.Health(False, "no engine has attested yet")
    server.attest("engine_core", dp_rank=1, facts={})
    assert server.health == health.Health(False, "engine_core DP1 has no KV cache yet")
    server.attest("engine_core", dp_rank=1)
    server.attest("worker", dp_rank=1, rank=0, facts={}, plugin_verified=False)
    assert server.health == health.Health(False, "worker DP1 rank 0 is not verified yet")
    server.attest("worker", dp_rank=1, rank=0, facts={})
    assert server.health == health.Health(True, "engines up, 2 processes alive")


def test_a_headless_node_without_the_kv_budget_is_judged_by_its_attestations(server: Server) -> None:
    server.supervise(gated=False)
    server.attest("engine_core", dp_rank=1, facts={}, patches=[{"id": "kv_budget", "state": "off"}])
    assert server.health.healthy


@pytest.mark.parametrize(("mode", "healthy"), [("enforce", False), ("report", True)])
def test_a_refused_patch_keeps_a_headless_node_unhealthy_where_patches_are_enforced(
    server: Server, mode: str, *, healthy: bool
) -> None:
    server.supervise(gated=False)
    server.attest("engine_core", dp_rank=1, mode=mode, patches=[{"id": "kv_null_block", "state": "refused"}])
    assert server.health.healthy is healthy


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where private folders are looked for."""
    monkeypatch.delenv(rundir.ENV, raising=False)
    monkeypatch.setattr(rundir, "bases", lambda: [tmp_path])
    return tmp_path


def test_the_living_server_is_found_before_a_newer_one_that_was_killed(places: Path, gone: int) -> None:
    living_one, killed = Server(places / "splint-a"), Server(places / "splint-b")
    killed.supervise(pid=gone)
    for server in (living_one, killed):
        server.phase("serving")
    os.utime(killed.folder / rundir.PHASE, (2e9, 2e9))
    assert living.private_folders() == [killed.folder, living_one.folder]
    assert health._folder() == report.newest_folder() == living_one.folder


def test_an_lmcache_server_without_an_engine_is_reported_of_but_is_no_server_to_be_healthy(
    places: Path, gone: int
) -> None:
    alone, left, shared = (rundir.prepare(places / f"splint-{name}") for name in ("alone", "left", "shared"))
    for folder, pid in ((alone, os.getpid()), (left, gone), (shared, gone)):
        own = {"role": "lmcache_server", "host": socket.gethostname(), "pid": pid, "start_time": started(os.getpid())}
        rundir.write_json(folder / rundir.ROSTER / f"{pid}.json", own)
    rundir.write_json(shared / rundir.PHASE, {"phase": "serving"})
    assert report.newest_folder() == alone
    assert living.ended_cache_server_folders() == [left]
    assert health._folder() is None


def test_a_killed_server_in_whose_place_another_process_runs_is_not_taken_for_living(places: Path) -> None:
    """In a container that is started again the new server has pid 1, as the killed one had."""
    Server(places / "splint-a").supervise(started=1)
    assert health._folder() is None


def test_a_server_without_a_supervising_parent_lives_by_its_processes(server: Server, gone: int) -> None:
    (server.folder / living.SUPERVISOR).unlink()
    server.attest("lmcache_server")
    assert not living.is_living(server.folder)
    server.attest("api_server", rank=0)
    assert living.is_living(server.folder)
    server.attest("api_server", rank=0, pid=gone)
    assert not living.is_living(server.folder)


def test_no_server_is_one_line_with_the_places_looked_in(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert health.main([]) == 1
    assert capsys.readouterr().out == f"unhealthy: no server of this user runs here (looked in {places})\n"


def test_a_named_run_directory_is_the_only_one_looked_in(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Server(places / "splint-a").phase("serving")
    monkeypatch.setenv(rundir.ENV, str(places / "named"))
    assert health.main([]) == 1
    assert f"{rundir.ENV}={places / 'named'}" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["now"], 2)])
def test_anything_but_help_is_wrong_usage(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert health.main(words) == code
    assert capsys.readouterr().out.startswith("Usage: splint health\n")


SUPERVISED = """
import os, signal, sys
from patches.supervision import fork
sys.orig_argv = [sys.executable, *sys.argv[1:]]
fork.supervise()
os.write(1, b"up")
signal.pause()
"""


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """A real supervising parent above a process that does nothing: ``supervised(*words) -> run directory``."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> Path:
        folder = tmp_path / "run"
        environ = {"PATH": "", "PYTHONPATH": str(ROOT), rundir.ENV: str(folder)}
        process = subprocess.Popen([sys.executable, "-c", SUPERVISED, *words], env=environ, stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.read(2) == b"up"
        deadline = time.monotonic() + 60
        while not (folder / living.SUPERVISOR).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return folder

    yield start
    for process in running:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize(
    ("words", "reason"), [((), "phase loading"), (("vllm", "serve", "--headless"), "no engine has attested yet")]
)
def test_a_supervising_parent_says_what_health_needs(
    supervised: Callable[..., Path], words: tuple[str, ...], reason: str
) -> None:
    folder = supervised(*words)
    assert living.is_living(folder)
    assert health.health(folder) == health.Health(False, reason)


def ask(folder: Path) -> subprocess.CompletedProcess[str]:
    script = (
        "import sys; from entrypoint.start import main; sys.argv = ['splint', 'health']\n"
        "try: main()\nfinally: print([n for n in ('vllm', 'torch', 'typer', 'rich') if n in sys.modules])"
    )
    return subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(ROOT), rundir.ENV: str(folder)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_command_answers_without_importing_what_is_slow(server: Server) -> None:
    server.phase("serving")
    said = ask(server.folder)
    assert (said.returncode, said.stdout, said.stderr) == (0, "healthy: serving, 0 processes alive\n[]\n", "")


def test_the_command_takes_less_than_150_ms_of_a_core(server: Server) -> None:
    """Of processor time, where an interpreter that does nothing takes 12 ms; a slower core may take longer."""

    def spent(work: Callable[[], object]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        work()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    nothing = min(spent(lambda: subprocess.run([sys.executable, "-c", ""], check=True)) for _ in range(3))
    asked = min(spent(lambda: ask(server.folder)) for _ in range(3))
    print(f"splint health: {asked * 1000:.0f} ms of a core, an empty interpreter {nothing * 1000:.0f} ms")
    assert asked < 0.15 * max(1.0, nothing / 0.012)
