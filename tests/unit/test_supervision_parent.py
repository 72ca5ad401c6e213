"""The supervising parent above small real process trees that play vLLM's parts.

Times that run out are a tenth of the real ones, so that the tests are quick. A play that is to end by itself before its
time is up gets :data:`PATIENT` times: on a busy machine a process may stand still for a second or two.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patches.framework import roster, rundir
from patches.supervision import processes

ROOT = Path(__file__).parents[2]
HURRIED = """
import json, os, pathlib, signal, sys, time
from patches.framework import roster, rundir
from patches.supervision import clearing, fork, outcome, parent
tenth = lambda granted: outcome.Patience(granted.until_term / 10, granted.until_kill / 10)
outcome._PATIENCE = {end: tenth(granted) for end, granted in outcome._PATIENCE.items()}
outcome.TEARDOWN_S = .5
parent._LOOK_EVERY_S = parent._ORPHANS_S = parent._SAME_REQUEST_S = clearing._AFTER_TERM_S = .1
clearing._AFTER_KILL_S = clearing._TRACKERS_S = 30  # both are over as soon as the processes are
"""
PATIENT = """
outcome._PATIENCE = dict.fromkeys(outcome._PATIENCE, outcome.Patience(60, 120))
outcome._PATIENCE[outcome.End.STOPPED] = outcome.Patience(0, 120)
outcome.TEARDOWN_S = parent._SAME_REQUEST_S = 60
"""
PLAY = """
run = pathlib.Path(os.environ["SPLINT_RUN_DIR"])
def say(name): os.write(1, f"{name} {os.getpid()}\\n".encode())
def attest(role, **ranks):
    rundir.write_json(run / "roster" / f"{os.getpid()}.json", {"role": role, "pid": os.getpid(), **ranks})
    say(role)
def phase(name, **more): rundir.write_json(run / "phase.json", {"phase": name, **more})
def refuse(): rundir.write_json(run / "refused" / f"{os.getpid()}.json", {"found": "F", "wanted": "W", "remedy": "R"})
def stubborn(*signals):
    for number in signals or (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
def rest():
    while True: signal.pause()
def start(body):
    pid = os.fork()
    if pid == 0:
        try: body()
        finally: os._exit(0)
    return pid
def engine(): attest("engine_core", dp_rank=1); rest()
def on(number, body): signal.signal(number, lambda *_: body())
def go_on(): sys.stdin.read()
"""


class Play:
    """A supervised play: its processes tell their names and pids on stdout, in the order in which they are ready."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self._errors = errors
        self.pids: dict[str, int] = {}

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    def wait_for(self, *names: str) -> None:
        while not set(names) <= set(self.pids):
            line = self._line()
            self.pids[line.split()[0]] = int(line.split()[1])

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the play ended early: {self.stderr}"
        return line

    def send(self, number: int, name: str | None = None) -> None:
        os.kill(self.pids[name] if name else self.pid, number)

    def let_on(self) -> None:
        """End the wait of a play that reads its stdin."""
        self.process.communicate("x")

    def end(self) -> int:
        return self.process.wait(60)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.send(number)
        return self.end()

    def left(self) -> dict[str, int]:
        return {name: pid for name, pid in self.pids.items() if processes.read_state(pid) is not None}


Stage = Callable[..., Play]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    plays: list[Play] = []

    def stage(body: str, *flags: str, before: str = "", prefix: tuple[str, ...] = (), **environ: str) -> Play:
        script, errors = tmp_path / f"play{len(plays)}.py", tmp_path / f"errors{len(plays)}"
        script.write_text(f"{HURRIED}\n{before}\nfork.supervise()\n{PLAY}\n{body}\n")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPLINT_")}
        env = {**inherited, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path), **environ}
        with errors.open("w") as file:
            command = [*prefix, sys.executable, str(script), *flags]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=file, text=True)
        plays.append(Play(process, errors))
        return plays[-1]

    yield stage
    for play in plays:
        _sweep(play)


def _sweep(play: Play) -> None:
    for pid in (play.pid, *play.pids.values()):
        if play.process.poll() is None or pid != play.pid:
            processes.send(pid, signal.SIGKILL)
    play.process.wait(60)
    for pipe in (play.process.stdin, play.process.stdout):
        if pipe is not None:
            pipe.close()


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_part_lost_on_another_node_ends_the_server_as_a_death_does(stage: Stage) -> None:
    play = stage('attest("api_server"); rundir.write_json(run / "lost.json", {"what": "lost DP1"}); rest()')
    assert play.end() == 1
    assert "splint: lost DP1; ending the server" in play.stderr
    assert play.left() == {}


def test_state_changes_are_json_lines_where_that_is_asked_for(stage: Stage) -> None:
    play = stage("start(engine); time.sleep(.3); refuse(); sys.exit(0)", SPLINT_LOG="json")
    assert play.end() == 78
    told = [json.loads(line) for line in play.stderr.splitlines()]
    assert [(line["event"], line.get("remedy")) for line in told][-1] == ("refused", "R")


@pytest.mark.parametrize("code", [0, 3])
def test_command_that_starts_no_engine_keeps_its_own_code(stage: Stage, code: int) -> None:
    play = stage(f"sys.exit({code})")
    assert play.end() == code
    assert play.stderr == ""


def test_main_process_killed_by_a_signal_gives_128_and_its_number(stage: Stage) -> None:
    play = stage("os.kill(os.getpid(), signal.SIGKILL)")
    assert play.end() == 137
    assert "ended unasked, killed by SIGKILL" in play.stderr


@pytest.mark.parametrize("role", ["engine_core", "worker", "dp_coordinator", "api_server"])
def test_killed_member_ends_a_server_that_does_not_notice(stage: Stage, role: str) -> None:
    play = stage(f"""
def member(): stubborn(); attest({role!r}, dp_rank=1, rank=0); rest()
def above(): stubborn(); start(member); say("above"); rest()
stubborn(); start(above); say("main"); rest()""")
    play.wait_for(role, "above", "main")
    play.send(signal.SIGKILL, role)
    assert play.end() == 1
    assert f"splint: {role} dp rank 1, rank 0 (pid {play.pids[role]}) ended unasked, killed by SIGKILL" in play.stderr
    assert play.left() == {}


def test_member_that_ended_before_it_was_seen_ends_the_server(stage: Stage) -> None:
    play = stage("pid = start(lambda: attest('dp_coordinator')); os.waitpid(pid, 0); stubborn(); rest()")
    assert play.end() == 1
    assert "dp_coordinator (pid" in play.stderr


def test_member_that_ends_while_its_ancestors_are_looked_up_ends_the_server(stage: Stage) -> None:
    """Taken for somebody else's, it would never be missed."""
    play = stage(
        "pid = start(engine); os.waitpid(pid, 0); stubborn(); rest()",
        before="""
from patches.supervision import processes
look = processes.is_descendant
def ending(pid, root):
    os.kill(pid, signal.SIGKILL)
    while processes.read_state(pid): time.sleep(.01)
    return look(pid, root)
processes.is_descendant = ending""",
    )
    assert play.end() == 1
    assert "engine_core dp rank 1 (pid" in play.stderr


def test_killed_member_is_noticed_without_pidfds(stage: Stage) -> None:
    play = stage("start(engine); say('main'); rest()", before="del os.pidfd_open")
    play.wait_for("engine_core", "main")
    play.send(signal.SIGKILL, "engine_core")
    assert play.end() == 1
    assert "engine_core dp rank 1" in play.stderr


@pytest.mark.parametrize(("own", "code"), [(0, 1), (7, 7)])
def test_main_process_that_ends_after_a_death_keeps_only_a_failing_code(stage: Stage, own: int, code: int) -> None:
    play = stage(f"pid = start(engine); os.waitpid(pid, 0); sys.exit({own})", before=PATIENT)
    play.wait_for("engine_core")
    play.send(signal.SIGKILL, "engine_core")
    assert play.end() == code


def test_success_that_nobody_asked_for_is_none_once_an_engine_was_up(stage: Stage) -> None:
    play = stage("start(engine); go_on(); sys.exit(0)")
    play.wait_for("engine_core")
    play.let_on()
    assert play.end() == 1
    assert "nobody asked it to" in play.stderr
    assert play.left() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("told", ["pass", "phase('smoke', drain_s=60)"])
def test_stop_is_obeyed_while_nothing_is_served_whatever_vllm_does(stage: Stage, number: int, told: str) -> None:
    play = stage(f"""
def worker(): stubborn(); attest("worker"); rest()
def core(): stubborn(); start(worker); attest("engine_core"); rest()
stubborn(); {told}; start(core); say("main"); rest()""")
    play.wait_for("main", "engine_core", "worker")
    began = time.monotonic()
    assert play.stop(number) == 0
    assert time.monotonic() - began < 30, "the drain, which is 60 s"
    assert play.left() == {}
    assert "ended unasked" not in play.stderr


def test_main_process_is_sent_sigterm_and_may_end_in_order(stage: Stage) -> None:
    play = stage(
        """
def ordered(): os.kill(core, signal.SIGTERM); os.waitpid(core, 0); say("ordered"); sys.exit(0)
core = start(engine); on(signal.SIGTERM, ordered); phase("serving", drain_s=0); say("main"); rest()""",
        before=PATIENT,
    )
    play.wait_for("main", "engine_core")
    assert play.stop(signal.SIGINT) == 0
    play.wait_for("ordered")
    assert play.stderr == ""


DRAINING = """
def drain(): say("asked"); time.sleep({seconds}); say("drained"); sys.exit(0)
on(signal.SIGTERM, drain); {told}; say("main"); rest()"""


@pytest.mark.parametrize("phase", ["serving", "draining"])
def test_requests_in_flight_get_their_drain(stage: Stage, phase: str) -> None:
    play = stage(DRAINING.format(seconds=1.2, told=f"phase('{phase}', drain_s=60)"))
    play.wait_for("main")
    assert play.stop() == 0
    play.wait_for("drained")


def test_drain_that_does_not_end_is_cut_off_and_told_in_the_code(stage: Stage) -> None:
    play = stage(DRAINING.format(seconds=60, told="phase('serving', drain_s=.5)"))
    play.wait_for("main")
    assert play.stop() == 143
    assert "killed 1 processes" in play.stderr


@pytest.mark.parametrize(("flags", "environ"), [(["--headless"], {}), ([], {"SPLINT_PATCHES": "-serving_gate"})])
def test_server_that_tells_no_phase_gets_the_drain_of_its_command_line(
    stage: Stage, flags: list[str], environ: dict[str, str]
) -> None:
    play = stage(DRAINING.format(seconds=1.2, told="pass"), *flags, "--shutdown-timeout", "60", **environ)
    play.wait_for("main")
    assert play.stop() == 0
    play.wait_for("drained")


@pytest.mark.parametrize(("selection", "seconds", "code"), [("all", 1.2, 0), ("-graceful_drain", 60, 143)])
def test_headless_server_gets_the_default_drain_unless_that_patch_is_left_out(
    stage: Stage, selection: str, seconds: float, code: int
) -> None:
    play = stage(DRAINING.format(seconds=seconds, told="pass"), "--headless", SPLINT_PATCHES=selection)
    play.wait_for("main")
    assert play.stop() == code


def test_second_request_kills_at_once(stage: Stage) -> None:
    play = stage(DRAINING.format(seconds=60, told="phase('serving', drain_s=60)"))
    play.wait_for("main")
    play.send(signal.SIGTERM)
    play.wait_for("asked")
    time.sleep(0.2)  # longer than two signals of one request are apart
    began = time.monotonic()
    assert play.stop(signal.SIGINT) == 143
    assert time.monotonic() - began < 30, "the drain, which is 60 s"


def test_one_request_sent_twice_is_no_second_request(stage: Stage) -> None:
    play = stage(DRAINING.format(seconds=0.5, told="phase('serving', drain_s=60)"), before=PATIENT)
    play.wait_for("main")
    play.send(signal.SIGTERM)
    play.send(signal.SIGINT)
    assert play.end() == 0
    play.wait_for("drained")


VERDICT = "rundir.write_json(run / 'verdict.json', {'status': 'failed'}); say('main'); rest()"


def test_failed_smoke_tests_end_the_server(stage: Stage) -> None:
    play = stage(f"start(engine); stubborn(); go_on(); {VERDICT}")
    play.wait_for("engine_core")
    play.let_on()
    assert play.end() == 70
    assert play.stderr.splitlines()[-1] == "splint: ended because the smoke tests failed; their verdict stands above"
    assert play.left() == {}


def test_smoke_tests_that_fail_because_of_a_stop_are_no_failure(stage: Stage) -> None:
    play = stage("on(signal.SIGTERM, lambda: rundir.write_json(run / 'verdict.json', {'status': 'failed'})); "
                 "phase('smoke'); say('main'); rest()")  # fmt: skip
    play.wait_for("main")
    assert play.stop() == 0
    assert "smoke tests" not in play.stderr


def test_failed_smoke_tests_only_report_in_report_mode(stage: Stage) -> None:
    play = stage(f"on(signal.SIGTERM, sys.exit); {VERDICT}", SPLINT_MODE="report")
    play.wait_for("main")
    time.sleep(0.3)  # three looks
    assert play.stop() == 0


REFUSING = "pids = [start(refuse), start(refuse)]; [os.waitpid(pid, 0) for pid in pids]; say('main')"


def test_refusal_is_told_once_and_last(stage: Stage) -> None:
    play = stage(f"{REFUSING}; raise RuntimeError('Engine core initialization failed')", before=PATIENT)
    play.wait_for("main")
    assert play.end() == 78
    assert play.stderr.splitlines()[-4:] == [
        "splint: refused to serve",
        "  found: F",
        "  wanted: W",
        "  remedy: R",
    ]
    assert play.stderr.count("refused to serve") == 1
    assert play.stderr.index("Engine core initialization failed") < play.stderr.index("refused to serve")


def test_server_that_goes_on_after_a_refusal_is_ended(stage: Stage) -> None:
    play = stage(f"stubborn(); {REFUSING}; rest()")
    assert play.end() == 78


def test_orphans_that_left_the_session_and_ignore_sigterm_are_ended(stage: Stage) -> None:
    play = stage("""
def orphan(): os.setsid(); stubborn(signal.SIGTERM, signal.SIGHUP); say("orphan"); rest()
def between(): start(orphan); os._exit(0)
os.waitpid(start(between), 0); say("main"); rest()""")
    play.wait_for("main", "orphan")
    assert play.stop() == 0
    assert play.left() == {}


def test_ended_orphans_are_collected_while_the_server_runs(stage: Stage) -> None:
    play = stage("""
def orphan(): say("orphan"); os._exit(0)
def between(): start(orphan); os._exit(0)
os.waitpid(start(between), 0); say("main"); rest()""")
    play.wait_for("main", "orphan")
    _until(lambda: "orphan" not in play.left())
    assert play.stop() == 0


def test_shared_memory_of_a_killed_process_is_unlinked(stage: Stage) -> None:
    play = stage("""
from multiprocessing.shared_memory import SharedMemory
def core(): global memory; memory = SharedMemory(create=True, size=64); say(memory.name); attest("engine_core"); rest()
SharedMemory(create=True, size=64).unlink()  # starts the tracker here, as vLLM's first process does
start(core); stubborn(); say("main"); rest()""")
    play.wait_for("main", "engine_core")
    segment = next(name for name in play.pids if name.startswith("psm_"))
    assert Path("/dev/shm", segment).exists()
    play.send(signal.SIGKILL, "engine_core")
    assert play.end() == 1
    assert not Path("/dev/shm", segment).exists()


def test_private_run_directory_ends_with_the_server(stage: Stage, tmp_path: Path) -> None:
    play = stage("say('main'); rest()")
    play.wait_for("main")
    (folder,) = tmp_path.glob("splint-*")
    _until((folder / "supervisor.json").exists)
    told = rundir.read_json(folder / "supervisor.json") or {}
    assert (told["pid"], told["main_pid"]) == (play.pid, play.pids["main"])
    assert play.stop() == 0
    assert not folder.exists()


def test_named_run_directory_is_kept_and_cleared_of_an_earlier_server(stage: Stage, tmp_path: Path) -> None:
    folder = rundir.prepare(tmp_path / "named")
    rundir.write_json(folder / rundir.VERDICT, {"status": "failed"})
    rundir.write_json(folder / "battery.json", {"status": "passed"})
    rundir.write_json(folder / rundir.REFUSED / "1.json", {"found": "old"})
    rundir.write_json(folder / rundir.ROSTER / "999999999.json", {"role": "engine_core"})
    play = stage("attest('api_server'); say(run.name); time.sleep(.3); sys.exit(0)", SPLINT_RUN_DIR=str(folder))
    play.wait_for("named")
    assert play.end() == 0
    assert not (folder / "battery.json").exists()
    assert [path.name for path in (folder / rundir.ROSTER).iterdir()] == [f"{play.pids['api_server']}.json"]


def test_an_lmcache_server_that_came_first_stays_in_the_roster(stage: Stage, tmp_path: Path) -> None:
    folder = rundir.prepare(tmp_path / "named")
    cache = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        entry = {"role": "lmcache_server", "start_time": roster.start_time(cache.pid)}
        rundir.write_json(folder / rundir.ROSTER / f"{cache.pid}.json", entry)
        (folder / rundir.ROSTER / f"{cache.pid}.calls").write_bytes(bytes(8))
        rundir.write_json(folder / rundir.ROSTER / f"{os.getpid()}.json", {"role": "lmcache_server", "start_time": 1})
        play = stage("say('main'); sys.exit(0)", SPLINT_RUN_DIR=str(folder))
        assert play.end() == 0
        left = {path.name for path in (folder / rundir.ROSTER).iterdir()}
        assert left == {f"{cache.pid}.json", f"{cache.pid}.calls"}
    finally:
        cache.kill()
        cache.wait()


def test_two_servers_in_one_run_directory_are_refused(stage: Stage, tmp_path: Path) -> None:
    first = stage("say('main'); rest()", SPLINT_RUN_DIR=str(tmp_path / "named"))
    first.wait_for("main")
    second = stage("say('main'); rest()", SPLINT_RUN_DIR=str(tmp_path / "named"))
    assert second.end() == 78
    assert "another running server uses the run directory" in second.stderr
    assert first.stop() == 0


def test_unusable_run_directory_is_refused(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    play = stage("say('main')", SPLINT_RUN_DIR=str(tmp_path / "file"))
    assert play.end() == 78
    assert play.stderr.startswith("splint: ")


def test_server_inside_a_server_gets_its_own_run_directory(stage: Stage, tmp_path: Path) -> None:
    outer = {"SPLINT_RUN_DIR": str(tmp_path / "outer"), "SPLINT_SUPERVISOR_PID": "1"}
    play = stage("say(run.parent.name + '/' + run.name[:7]); sys.exit(0)", **outer)
    play.wait_for(f"{tmp_path.name}/splint-")
    assert play.end() == 0


def test_supervised_process_is_not_supervised_again(stage: Stage) -> None:
    play = stage("""
fork.supervise()
os.execv(sys.executable, [sys.executable, "-c", "import os; from patches.supervision import fork; fork.supervise();"
    "os.write(1, f'main {os.getppid()}\\\\n'.encode())"])""")
    play.wait_for("main")
    assert play.pids.pop("main") == play.pid
    assert play.end() == 0


def test_killed_supervisor_takes_the_server_with_it(stage: Stage) -> None:
    play = stage("on(signal.SIGTERM, lambda: (say('told'), sys.exit(0))); say('main'); rest()")
    play.wait_for("main")
    play.send(signal.SIGKILL)
    play.wait_for("told")


def test_other_signals_reach_the_main_process(stage: Stage) -> None:
    # The tests themselves may run under nohup.
    listening = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    play = stage("on(signal.SIGUSR1, lambda: say('usr1')); say('main'); rest()", before=listening)
    play.wait_for("main")
    play.send(signal.SIGUSR1)
    play.wait_for("usr1")
    assert play.stop(signal.SIGHUP) == 129


def test_hang_up_stays_ignored_under_nohup(stage: Stage) -> None:
    ignoring = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    play = stage("on(signal.SIGUSR1, lambda: say('usr1')); say('main'); rest()", before=ignoring)
    play.wait_for("main")
    play.send(signal.SIGHUP)
    play.send(signal.SIGUSR1)
    play.wait_for("usr1")
    assert play.stop() == 0


def test_broken_files_and_a_lost_run_directory_do_no_harm(stage: Stage, tmp_path: Path) -> None:
    play = stage(
        """
for name in ("roster/1.json", "roster/x.json", "roster/2.json", "phase.json", "verdict.json", "refused.json"):
    (run / name).write_text("[1, 2" if "2" in name else '{"role"')
say("main"); rest()""",
        before=PATIENT,
    )
    play.wait_for("main")
    (folder,) = tmp_path.glob("splint-*")
    time.sleep(0.3)  # three looks
    shutil.rmtree(folder)
    time.sleep(0.3)
    assert play.stop() == 0
    assert play.stderr == ""


def test_attestation_of_somebody_elses_process_is_not_watched(stage: Stage, tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    play = stage("say('main'); rest()")
    play.wait_for("main")
    (folder,) = tmp_path.glob("splint-*")
    rundir.write_json(folder / rundir.ROSTER / f"{other.pid}.json", {"role": "worker"})
    time.sleep(0.3)  # three looks
    other.communicate()
    time.sleep(0.3)
    assert play.process.poll() is None
    assert play.stop() == 0


def test_failure_of_the_supervisor_itself_ends_the_server(stage: Stage) -> None:
    broken = "def look(self): os.read(0, 1); 1 / 0\nparent.Supervisor._look = look"
    play = stage("start(engine); stubborn(); say('main'); rest()", before=broken)
    play.wait_for("main", "engine_core")
    play.let_on()
    assert play.end() == 1
    assert "the supervising parent failed (ZeroDivisionError" in play.stderr
    _until(lambda: play.left() == {})
    assert play.left() == {}


def test_supervisor_is_the_first_process_of_a_container(stage: Stage) -> None:
    unshare = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no pid namespaces here")
    told = "os.write(1, f'parent {os.getppid()}\\n'.encode())"
    play = stage(f"on(signal.SIGTERM, sys.exit); {told}; rest()", prefix=unshare)
    play.wait_for("parent")
    assert play.pids.pop("parent") == 1
    (inner,) = processes.descendants(play.pid)[:1]
    os.kill(inner, signal.SIGTERM)
    assert play.end() == 0
