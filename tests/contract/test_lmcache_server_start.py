"""``lmcache server`` starts under the rules of every process: with its patches, or not at all and with exit code 78."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.servers import engine_environment, free_port, lmcache_server

from patches.framework import process, rundir
from patches.framework.errors import AlreadyReplacedError, EnvironmentRefusedError
from patches.framework.records import Seam
from patches.lmcache_roster.wrappers import run_cache_server
from patches.supervision import living

pytest.importorskip("lmcache")
HERE = Path(__file__).parents[2]
TARGET = "lmcache.v1.multiprocess.modules.engine_driven_transfer:EngineDrivenTransferModule._release_entry"


def run(script: list[str], *folders: Path, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPLINT_")}
    path = os.pathsep.join(map(str, folders))
    return subprocess.run(
        [sys.executable, *script], env={**kept, "PYTHONPATH": path, **(environ or {})},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("words", "code"), [(["server"], 78), (["bench"], 1)])
def test_a_refusal_ends_it_with_the_code_of_refusals(tmp_path: Path, words: list[str], code: int) -> None:
    """Wherever it is raised: LMCache's web framework makes an exit code of its own of an error at start."""
    script = tmp_path / "lmcache"
    script.write_text(
        "from patches.framework import process\n"
        "from patches.framework.errors import FingerprintError\n"
        "process.start().refuse(FingerprintError('this was found', 'that', 'Do something.'))\n"
    )
    ended = run([str(script), *words], HERE)
    assert ended.returncode == code, ended.stderr
    assert "this was found; wanted that. Do something." in ended.stderr


def test_splint_report_finds_it_and_shows_its_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that shares no engine's run directory has one of its own."""
    environ = {**engine_environment(TMPDIR=str(tmp_path)), "XDG_RUNTIME_DIR": str(tmp_path)}
    environ.pop(rundir.ENV, None)
    with lmcache_server(tmp_path / "lmcache.log", environ=environ) as server:
        shown = subprocess.run(
            [sys.executable, "-m", "entrypoint.cli", "report", "--json"],
            env=environ, capture_output=True, text=True, timeout=240, check=True,
        )  # fmt: skip
        told = json.loads(shown.stdout)
        server.kill(signal.SIGTERM)
    (entry,) = told["processes"]
    assert (told["phase"], entry["role"], entry["alive"], entry["pid"]) == (
        "cache server", "lmcache_server", True, server.process.pid if server.process else None,
    )  # fmt: skip
    states = {found["id"]: found["state"] for found in entry["patches"]}
    assert states["lmcache_admission"] == states["lmcache_roster"] == "applied", states
    assert "refused" not in states.values()
    monkeypatch.delenv(rundir.ENV, raising=False)
    monkeypatch.setattr(rundir, "bases", lambda: [tmp_path])
    assert living.ended_cache_server_folders() == [Path(told["run_dir"])], "the next one clears it away"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_changed_source_ends_the_start(tmp_path: Path) -> None:
    """The reviewed fingerprint of one function is another one, as if LMCache had been changed."""
    for name in ("patches", "entrypoint"):
        shutil.copytree(HERE / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "patches" / "reviewed" / "lmcache-0.5.6.json"
    reviewed = json.loads(file.read_text())
    reviewed["targets"][TARGET] = "0" * 64
    file.write_text(json.dumps({**reviewed, "files": {}}))
    words = ["--port", str(free_port()), "--http-port", str(free_port()), "--l1-size-gb", "0.1"]
    ended = run(["-m", "lmcache.cli.main", "server", *words, "--eviction-policy", "LRU"], tmp_path)
    assert ended.returncode == 78, ended.stderr[-2000:]
    assert f"splint: {TARGET} has the source fingerprint" in ended.stderr


ENTRIES = {
    "the command": ["-m", "lmcache.cli.main", "server"],
    "its module": ["-m", "lmcache.v1.multiprocess.http_server"],
}
REFUSED = {
    "mock": ({}, ["--l2-adapter", '{"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 10}'], "second level mock"),
    "blend": ({}, ["--engine-type", "blend"], "--engine-type blend"),
    "setting": ({"SPLINT_LMCACHE_UNPROTECTED": "mok"}, [], "'mok'"),
    "run directory": ({rundir.ENV: "/proc/none"}, [], "/proc/none"),
}


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.parametrize("entry", ENTRIES)
def test_each_refusal_ends_each_form_of_start_with_the_code_of_refusals(entry: str, refused: str) -> None:
    """The web framework's own code for an error at start is 3."""
    environ, flags, said = REFUSED[refused]
    words = ["--port", str(free_port()), "--http-port", str(free_port()), "--l1-size-gb", "0.1"]
    ended = run([*ENTRIES[entry], *words, "--eviction-policy", "LRU", *flags], HERE, environ=environ)
    assert ended.returncode == 78, ended.stderr[-2000:]
    assert said in ended.stderr


def test_a_run_directory_that_can_not_be_made_is_a_refusal(tmp_path: Path) -> None:
    script = tmp_path / "lmcache"
    script.write_text(
        "from patches.framework.records import Seam\n"
        "from patches.lmcache_roster.wrappers import run_cache_server\n"
        "run_cache_server(Seam('run_cache_server', print, lambda: None))()\n"
    )
    ended = run([str(script), "server"], HERE, environ={rundir.ENV: "/proc/none"})
    assert ended.returncode == 78, ended.stderr
    assert "the run directory /proc/none can't be used" in ended.stderr


def test_the_form_that_no_patch_reaches_is_refused() -> None:
    """Its start is a function of the main module: it would serve without a role, and blend without being asked."""
    ended = run(["-m", "lmcache.v1.multiprocess.server", "--l1-size-gb", "0.1"], HERE)
    assert ended.returncode == 78, ended.stderr[-2000:]
    assert "lmcache.v1.multiprocess.server starts in its main module" in ended.stderr


@pytest.mark.usefixtures("reset_process")
def test_a_patch_that_is_not_in_place_keeps_it_from_serving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(rundir.ENV, str(tmp_path))
    served: list[str] = []
    start = run_cache_server(Seam("run_cache_server", lambda: served.append("served"), lambda: None))
    current = process.start()

    def displaced() -> None:
        raise AlreadyReplacedError("somebody replaced it", "the patch", "Remove it.")

    monkeypatch.setattr(current, "_check_places", displaced)
    with pytest.raises(AlreadyReplacedError):
        start()
    assert served == []
    monkeypatch.setattr(current, "_check_places", lambda: None)
    current.alone = True
    start()
    assert (served, current.alone) == (["served"], False)


@pytest.mark.usefixtures("reset_process")
def test_an_engine_that_blends_prompts_is_refused_until_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    start = run_cache_server(Seam("run_cache_server", served.append, lambda: None))
    monkeypatch.setattr(process.start(), "_check_places", lambda: None)
    monkeypatch.setattr(process.start(), "alone", False)
    with pytest.raises(EnvironmentRefusedError, match="--engine-type blend"):
        start(SimpleNamespace(engine_type="blend"))
    start(SimpleNamespace(engine_type="default"))
    monkeypatch.setenv("SPLINT_LMCACHE_UNPROTECTED", "blend")
    start(SimpleNamespace(engine_type="blend"))
    assert [each.engine_type for each in served] == ["default", "blend"]


@pytest.fixture
def reset_process() -> None:
    """The role of this test's process is nobody's business."""
    current = process.current()
    if current is not None:
        current.identity = {}
