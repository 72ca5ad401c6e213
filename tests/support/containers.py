"""Containers of tools/containers/engine.sh's engine: run, watched and removed as an operator would."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CPU_ENVIRONMENT", "ROOT", "Compose", "Container", "Start", "container", "docker", "wait_until"]

ROOT = Path(__file__).parents[2]
READY_S = 400.0
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",
}
"""What vLLM's CPU build needs on this machine, which has no name server; the images themselves set nothing of it."""


def docker(*words: str, timeout_s: float = 120.0, check: bool = True, stdin: str = "") -> str:
    """Run the docker command and return its stdout.

    Raises:
        RuntimeError: it failed; what it said is in the message.
    """
    done = subprocess.run(
        ["docker", *words], capture_output=True, text=True, timeout=timeout_s, check=False, input=stdin, cwd=ROOT
    )
    if check and done.returncode != 0:
        raise RuntimeError(
            f"docker {' '.join(words)}: code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done.stdout.strip()


def wait_until(true: Callable[[], bool], what: str, timeout_s: float = READY_S) -> float:
    """Wait until ``true()``; returns the seconds it took.

    Raises:
        TimeoutError: it did not come true in time.
    """
    start = time.monotonic()
    while not true():
        if time.monotonic() - start > timeout_s:
            raise TimeoutError(f"not {what} after {timeout_s:g} s")
        time.sleep(0.2)
    return time.monotonic() - start


@dataclass(frozen=True)
class Container:
    """One container by its id or name."""

    id: str

    def inspect(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(docker("inspect", self.id))[0]
        return found

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.inspect()["State"]
        return state

    @property
    def health(self) -> str:
        return str(self.state.get("Health", {}).get("Status", "none"))

    def logs(self, lines: int = 80) -> str:
        done = subprocess.run(
            ["docker", "logs", "--tail", str(lines), self.id], capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def wait_healthy(self, timeout_s: float = READY_S) -> float:
        """Wait for the image's own health check; returns the seconds it took.

        Raises:
            RuntimeError: it ended first; its log's end is in the message.
        """

        def healthy() -> bool:
            if not self.state["Running"]:
                raise RuntimeError(f"ended with code {self.state['ExitCode']}\n{self.logs()}")
            return self.health == "healthy"

        try:
            return wait_until(healthy, "healthy", timeout_s)
        except TimeoutError as error:
            raise RuntimeError(f"{error}\n{self.logs()}") from error

    def execute(self, *words: str, check: bool = True, timeout_s: float = 120.0) -> str:
        return docker("exec", self.id, *words, check=check, timeout_s=timeout_s)

    def python(self, code: str, *words: str, timeout_s: float = 120.0) -> str:
        """Run code with the image's Python, as a client beside the server; our own hooks stay out."""
        return docker(
            "exec", "-i", "-e", "SPLINT_MODE=off", self.id, "python3", "-", *words, stdin=code, timeout_s=timeout_s
        )

    def stop(self, seconds: int = 60) -> tuple[int, float]:
        """``docker stop``; returns the exit code and the seconds it took."""
        start = time.monotonic()
        docker("stop", "--time", str(seconds), self.id, timeout_s=seconds + 60)
        return int(self.state["ExitCode"]), time.monotonic() - start

    def wait_end(self, timeout_s: float) -> int:
        """Wait until it has ended by itself; returns its exit code."""
        wait_until(lambda: not self.state["Running"], f"ended ({self.logs(20)})", timeout_s)
        return int(self.state["ExitCode"])


Start = Callable[..., Container]


@contextmanager
def container(
    image: str, *words: str, options: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Iterator[Container]:
    """Run ``image`` with ``words`` behind its entry point; it is removed on leaving."""
    settings = [
        word for name, value in {**CPU_ENVIRONMENT, **(environ or {})}.items() for word in ("-e", f"{name}={value}")
    ]
    limits = ("--memory", "8g", "--shm-size", "1g", "--health-interval", "1s")
    found = Container(docker("run", "--detach", *limits, *settings, *options, image, *words))
    try:
        yield found
    finally:
        docker("rm", "--force", "--volumes", found.id, check=False)


@dataclass(frozen=True)
class Compose:
    """The project's compose.yaml with the override for this engine, under one profile."""

    profiles: tuple[str, ...]
    environ: Mapping[str, str]
    files: tuple[str, ...] = ()

    def __call__(self, *words: str, timeout_s: float = 300.0) -> str:
        names = ("compose.yaml", "tests/container/compose.ci.yaml", *self.files)
        files = [word for name in names for word in ("-f", name)]
        profiles = [word for name in self.profiles for word in ("--profile", name)]
        done = subprocess.run(
            ["docker", "compose", *files, *profiles, *words],
            capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT,
            env={**os.environ, "WHEELS": "/nonexistent", **self.environ},
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(
                f"compose {' '.join(words)}: code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
        return done.stdout.strip()

    def service(self, name: str) -> Container:
        """The service's one container, ended or not."""
        return Container(self("ps", "--all", "--quiet", name))

    @contextmanager
    def up(self, *, wait: bool = True) -> Iterator[Compose]:
        """``up --wait``; everything it made is gone on leaving."""
        waiting = ("--wait", "--wait-timeout", "420") if wait else ()
        try:
            try:
                self("up", "--detach", "--no-build", *waiting, timeout_s=480)
            except RuntimeError as error:
                raise RuntimeError(f"{error}\n{self('logs', '--tail', '60')}") from error
            yield self
        finally:
            self("down", "--volumes", "--timeout", "20")
