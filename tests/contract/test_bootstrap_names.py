"""Our package's name is a common one: programs keep their own ``patches``, and servers never start without ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder with another package named ``patches``."""
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "__init__.py").write_text("ORIGIN = 'foreign'\n")
    return tmp_path


def run(foreign: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPLINT_", "VLLM_"))}
    return subprocess.run(
        [sys.executable, *words],
        env={**kept, "PYTHONPATH": str(foreign)}, cwd=foreign, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_program_finds_its_own_package(foreign: Path) -> None:
    assert run(foreign, "-c", "import patches; print(patches.ORIGIN)").stdout.strip() == "foreign"


def test_vllm_gets_ours_where_a_foreign_one_stands_first(foreign: Path) -> None:
    code = "import vllm.plugins as p; p.load_general_plugins(); import patches; print(len(patches.PATCH_IDS) > 1)"
    ended = run(foreign, "-c", code)
    assert ended.stdout.strip().endswith("True"), ended.stderr[-2000:]


def test_a_foreign_one_that_was_imported_first_is_refused_by_name(foreign: Path) -> None:
    ended = run(foreign, "-c", "import patches, vllm")
    assert ended.returncode != 0
    assert f"a foreign package 'patches' ({foreign}/patches/__init__.py) was imported before vLLM" in ended.stderr


def test_a_server_whose_start_up_hooks_fail_is_refused(foreign: Path) -> None:
    """An installation without its own ``patches`` beside the line, as after a careless deletion."""
    line = next(Path(entry) for entry in sys.path if (Path(entry) / "vllm_splint.pth").exists()) / "vllm_splint.pth"
    alone = foreign / "site"
    alone.mkdir()
    (alone / "vllm_splint.pth").write_text(line.read_text())
    code = f"""
import site, sys
sys.orig_argv[:] = ["python", "/x/vllm", "serve"]
del sys._splint_started
sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
site.addsitedir({str(alone)!r})
print("served")
"""
    ended = run(foreign, "-c", code)
    assert ended.returncode == 78
    assert "the start-up hooks failed" in ended.stderr
    assert "served" not in ended.stdout
