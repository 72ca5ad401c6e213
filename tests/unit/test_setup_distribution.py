"""What an installation puts where: the wheel, an editable install, and the start-up line in both."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE = (ROOT / "patches" / "vllm_splint.pth").read_text(encoding="utf-8")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
BUILD = ["--no-deps", "--no-build-isolation", "--no-index"]

BOOTSTRAP = "import sys\n__all__ = []\ndef start():\n    sys.stdout.write('started')\n"
BROKEN = "raise RuntimeError('broken')\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", *BUILD, "--wheel-dir", str(folder), str(ROOT)], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The interpreter of a fresh environment that holds the project and nothing else; the tests only read it."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    what = wheel if request.param == "wheel" else _editable_wheel(folder)
    subprocess.run([*PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(what)], check=True)
    return python


def _editable_wheel(folder: Path) -> Path:
    """What ``pip install --editable`` builds and installs; built here, where the build tools are."""
    code = "import sys, hatchling.build; print(hatchling.build.build_editable(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(folder)]
    built = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return folder / built.stdout.strip()


def run(python: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SPLINT_", "PYTHON"))}
    command = [str(python), "-P", "-c", code]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, cwd="/", env={**clean, **environment}, timeout=120
    )


def test_the_wheel_ships_the_line_the_reviewed_sources_and_the_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read("vllm_splint-0.1.0.dist-info/entry_points.txt").decode()
        assert archive.read("vllm_splint.pth").decode() == LINE
    assert {path.relative_to(ROOT).as_posix() for path in ROOT.glob("patches/reviewed/*.json")} <= names
    assert "vllm_splint = patches.plugin:verify" in entry_points
    assert "splint = entrypoint.start:main" in entry_points
    assert not {name for name in names if name.startswith(("tests", "tools", "docs"))}


def test_an_installation_moves_neither_torch_nor_vllm(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("vllm_splint-0.1.0.dist-info/METADATA").decode()
    required = {line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Requires-Dist")}
    assert {name for name in required if any(sign in name for sign in "<>=!~")} == {"wrapt>=2"}
    assert not required & {"vllm", "lmcache", "torch"}


def test_every_interpreter_of_an_installation_starts_the_hooks(installed: Path) -> None:
    started = run(installed, "from patches.bootstrap import started; print(started())")
    assert (started.stdout, started.stderr) == ("True\n", "")


def test_off_leaves_the_interpreter_as_it_was(installed: Path) -> None:
    loaded = run(installed, "import sys; print('patches' in sys.modules)", SPLINT_MODE="off")
    assert (loaded.stdout, loaded.stderr) == ("False\n", "")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the line and a stand-in for the package that it starts."""
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "__init__.py").touch()
    (tmp_path / "vllm_splint.pth").write_text(LINE, encoding="utf-8")
    return tmp_path


def run_line(site: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"import site, sys; sys.path.insert(0, {str(site)!r}); site.addsitedir({str(site)!r})"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SPLINT_", "PYTHON"))}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env={**clean, **environment}, timeout=120
    )


def test_the_line_starts_the_bootstrap(site: Path) -> None:
    (site / "patches" / "bootstrap.py").write_text(BOOTSTRAP, encoding="utf-8")
    assert run_line(site).stdout == "started"
    assert run_line(site, SPLINT_MODE="report").stdout == "started"


def test_the_line_does_nothing_when_off(site: Path) -> None:
    (site / "patches" / "bootstrap.py").write_text(BOOTSTRAP, encoding="utf-8")
    assert run_line(site, SPLINT_MODE="off").stdout == ""


@pytest.mark.parametrize("source", [None, BROKEN, "def start(): raise RuntimeError('broken')\n", "x = ("])
def test_a_bootstrap_that_fails_neither_prints_nor_raises(site: Path, source: str | None) -> None:
    if source is not None:
        (site / "patches" / "bootstrap.py").write_text(source, encoding="utf-8")
    finished = run_line(site)
    assert (finished.stdout, finished.stderr) == ("", "")


def test_the_line_is_one_line() -> None:
    assert LINE.count("\n") == 1
    assert LINE.startswith("import ")
