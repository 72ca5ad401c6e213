"""``lmcache server`` starts under the rules of every process: with its patches, or not at all and with exit code 78."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.servers import free_port

from patches.framework import process
from patches.framework.errors import AlreadyReplacedError
from patches.framework.records import Seam
from patches.lmcache_roster.wrappers import run_cache_server

pytest.importorskip("lmcache")
HERE = Path(__file__).parents[2]
TARGET = "lmcache.v1.multiprocess.modules.engine_driven_transfer:EngineDrivenTransferModule._release_entry"


def run(script: list[str], *folders: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPLINT_")}
    path = os.pathsep.join(map(str, folders))
    return subprocess.run(
        [sys.executable, *script], env={**kept, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280,
        check=False,
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


@pytest.mark.usefixtures("reset_process")
def test_a_patch_that_is_not_in_place_keeps_it_from_serving(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture
def reset_process() -> None:
    """The role of this test's process is nobody's business."""
    current = process.current()
    if current is not None:
        current.identity = {}
