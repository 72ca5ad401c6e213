"""Starting and ending the stack: every end is orderly, bounded and leaves nothing, whatever the programs do.

The programs are small stand-ins, so that each can misbehave in its own way; real ones run in the end-to-end tests.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from entrypoint.local.ports import free_ports

CACHE = """
import http.server, sys
port = int(sys.argv[sys.argv.index("--http-port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
ENGINE = """
import http.server, json, os, signal, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", deaf])
print("engine", os.getpid(), "child", child.pid, flush=True)
phases = ["loading", "smoke", None]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        phase = phases.pop(0) if len(phases) > 1 else phases[0]
        self.send_response(503 if phase else 200); self.end_headers()
        self.wfile.write(json.dumps({"phase": phase}).encode())
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DEAF = "import signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\nsignal.pause()\n"


class Run:
    """One running stack and what it has said."""

    def __init__(self, process: subprocess.Popen[bytes], output: int) -> None:
        self.process = process
        self.said = ""
        self._output = output

    def until(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        """Wait for a line that matches."""
        deadline = time.monotonic() + seconds
        while (match := re.search(pattern, self.said)) is None:
            if not self._hear(deadline - time.monotonic()):
                pytest.fail(f"{pattern!r} was not said:\n{self.said}")
        return match

    def _hear(self, seconds: float) -> bool:
        """Take what is said within ``seconds``; False where that is nothing."""
        if not select.select([self._output], [], [], max(0.0, seconds))[0]:
            return False
        try:
            data = os.read(self._output, 65536)
        except OSError:  # the other end of a pseudo-terminal is gone
            return False
        self.said += data.decode(errors="replace")
        return bool(data)

    def end(self) -> int:
        """Wait for its end; the exit code."""
        code = self.process.wait(timeout=120)
        while self._hear(1.0):
            pass
        return code


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a stack of two programs given as source text."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    runs: list[Run] = []

    def start(engine: str = ENGINE, cache: str = CACHE) -> Run:
        for name, source in (("engine.py", engine), ("cache.py", cache)):
            (tmp_path / name).write_text(textwrap.dedent(source), encoding="utf-8")
        code = f"""
            import asyncio, sys
            from entrypoint.local import ready, stack
            from entrypoint.local.plan import Plan
            stack.ENGINE_GRACE_SECONDS = stack.CACHE_GRACE_SECONDS = 1.0
            ready.TIMEOUT_SECONDS = 60.0
            launchers = {{"launcher": (sys.executable, {str(tmp_path / "engine.py")!r}),
                          "cache_launcher": (sys.executable, {str(tmp_path / "cache.py")!r})}}
            plan = Plan(model={str(tmp_path)!r}, architecture="", port={free_ports(1)[0]}, arguments=(), **launchers)
            try:
                sys.exit(asyncio.run(stack.Stack(plan).run()))
            except stack.SplintError as error:
                print(error, flush=True)
                sys.exit(1)
        """
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        runs.append(Run(process, process.stdout.fileno()))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
        assert run.process.stdout is not None
        run.process.stdout.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(*pids: int) -> bool:
    """Whether none is left. A killed process is there until it gets a processor to die on."""
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


def pids(run: Run) -> list[int]:
    match = run.until(r"engine (\d+) child (\d+)")
    return [int(match[1]), int(match[2])]


def test_phases_are_told_then_a_ready_line_with_two_examples(start: Start) -> None:
    run = start()
    run.until(r"loading\n[^$]*smoke\n[^$]*READY after \d+ s: http://127\.0\.0\.1:\d+/v1")
    run.until(r"curl http://127\.0\.0\.1:\d+/v1/chat/completions")
    run.until(r"client = OpenAI\(")
    run.process.terminate()
    assert run.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_serving_ends_everything_with_0(start: Start, number: signal.Signals) -> None:
    run = start()
    started = pids(run)
    run.until("READY")
    run.process.send_signal(number)
    assert run.end() == 0
    assert gone(*started)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_cache_starts_ends_everything_with_0(start: Start, number: signal.Signals) -> None:
    run = start(cache=DEAF)
    run.until("starting the LMCache server")
    run.process.send_signal(number)
    assert run.end() == 0
    assert "starting the engine" not in run.said


def test_an_engine_that_ignores_sigterm_is_killed_after_the_grace_period(start: Start) -> None:
    run = start(engine=DEAF)
    run.until("deaf")
    run.process.terminate()
    assert run.end() == 0
    assert "did not end within 1 s and is killed" in run.said


def test_the_exit_code_of_an_engine_that_ends_by_itself_is_ours(start: Start) -> None:
    run = start(engine="import sys; sys.exit(70)")
    assert run.end() == 70
    assert "the engine ended with exit code 70" in run.said


def test_an_engine_that_a_signal_killed_is_reported_as_a_shell_would(start: Start) -> None:
    run = start()
    engine, child = pids(run)
    os.kill(engine, signal.SIGKILL)
    assert run.end() == 128 + signal.SIGKILL
    assert gone(child)


def test_the_cache_ends_with_the_engine(start: Start) -> None:
    run = start(engine="import sys; sys.exit(3)", cache=CACHE + "\n")
    assert run.end() == 3
    assert "everything that was started has ended" in run.said


MORTAL = """
import pathlib, threading, time
print("about to die")
threading.Thread(target=lambda: exec(CACHE), daemon=True).start()
while not pathlib.Path(__file__).with_name("die").exists(): time.sleep(0.01)
"""


def test_a_cache_that_dies_is_reported_and_the_engine_goes_on(start: Start, tmp_path: Path) -> None:
    run = start(cache=f"CACHE = {CACHE!r}\n{MORTAL}")
    started = pids(run)
    (tmp_path / "die").touch()
    run.until("the LMCache server ended with exit code 0, the engine goes on without it:\nabout to die")
    run.until("to cache again, start it in another terminal: ")
    run.until("READY")
    assert alive(started[0])
    run.process.terminate()
    assert run.end() == 0


def test_a_cache_that_does_not_start_is_an_error_with_its_last_lines(start: Start) -> None:
    run = start(cache="import sys; sys.exit('address already in use')")
    assert run.end() == 1
    assert "the LMCache server ended with exit code 1:\naddress already in use" in run.said
    assert "starting the engine" not in run.said


def test_a_stack_that_was_killed_leaves_no_engine(start: Start) -> None:
    run = start()
    engine, child = pids(run)
    watched = os.pidfd_open(engine)
    run.process.kill()
    ended, _, _ = select.select([watched], [], [], 60)
    os.close(watched)
    os.kill(child, signal.SIGKILL)
    assert ended


def test_ctrl_c_under_make_reaches_the_stack_alone(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import signal
            from entrypoint.local.terminal import own_foreground
            with own_foreground():
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                print("waiting", flush=True)
                print("got", signal.sigwait({signal.SIGINT}).name, flush=True)
        """),
        encoding="utf-8",
    )
    (tmp_path / "Makefile").write_text(f"serve:\n\t@{sys.executable} {program}\n\t@echo went on\n", encoding="utf-8")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("make", ["make", "-C", str(tmp_path), "serve"])
    run = Run(subprocess.Popen(["true"]), terminal)
    run.until("waiting")
    os.write(terminal, b"\x03")
    run.until("got SIGINT[^$]*went on")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    run.process.wait()
    os.close(terminal)
