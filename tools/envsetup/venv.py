"""The state of ``.venv``: what it was made for, whether it is whole, and the repair of one that was interrupted."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

from envsetup.lockfile import Pin, canonical

__all__ = ["Venv", "alias", "installed"]


class Venv:
    """A virtual environment with a record of how far its making has come.

    Attributes:
        path: Its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = path / "splint-setup.json"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    @property
    def log(self) -> Path:
        """Everything that pip said."""
        return self.path / "splint-setup.log"

    @property
    def site_packages(self) -> Path:
        """Where distributions lie."""
        return next(self.path.glob("lib/python3*/site-packages"))

    def state(self) -> dict[str, Any]:
        """What :meth:`record` wrote last; empty for an environment that is not there or not ours."""
        try:
            state = json.loads(self._state.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) and self.python.exists() else {}

    def record(self, **state: Any) -> None:
        """Replace the record, whole or not at all."""
        temporary = self._state.with_suffix(".tmp")
        temporary.write_text(json.dumps(state, indent=1), encoding="utf-8")
        temporary.replace(self._state)

    def remove(self) -> None:
        """Delete the environment, if there is one."""
        shutil.rmtree(self.path, ignore_errors=True)

    def installed(self) -> dict[str, str]:
        """Versions of the distributions that have metadata, by canonical name."""
        return installed(self.site_packages)

    def missing(self, pins: dict[str, Pin]) -> list[Pin]:
        """The pins that are not installed at their version."""
        installed = self.installed()
        return [pin for name, pin in pins.items() if installed.get(name) != pin.version]

    def drop_torn(self) -> list[str]:
        """Remove the metadata of distributions whose files are not all there, so that pip installs them again.

        pip writes a distribution's metadata before its files are complete; after an interruption it would take such a
        one for installed.
        """
        torn = [path for path in self.site_packages.glob("*.dist-info") if not self._whole(path)]
        for path in torn:
            shutil.rmtree(path)
        return [path.name[: -len(".dist-info")] for path in torn]

    def _whole(self, dist_info: Path) -> bool:
        try:
            with (dist_info / "RECORD").open(encoding="utf-8", newline="") as file:
                return all(self._intact(row) for row in csv.reader(file) if row)
        except OSError:
            return False

    def _intact(self, row: list[str]) -> bool:
        """Whether one file of a RECORD is there with its size; compiled files come and go."""
        name, _, size = row
        if name.endswith(".pyc"):
            return True
        try:
            found = (self.site_packages / name).stat().st_size
        except OSError:
            return False
        return not size or found == int(size)

    def alias(self, distribution: str, name: str, suffix: str) -> None:
        """Give ``distribution`` a second name in the metadata: :func:`alias`."""
        alias(self.site_packages, distribution, name, suffix)


def installed(site_packages: Path) -> dict[str, str]:
    """Versions of the distributions in a folder that have metadata, by canonical name."""
    names = (path.name[: -len(".dist-info")].rpartition("-") for path in site_packages.glob("*.dist-info"))
    return {canonical(name): version for name, _, version in names}


def alias(site_packages: Path, distribution: str, name: str, suffix: str) -> None:
    """Give ``distribution`` a second name in the metadata.

    vLLM asks for its own version under the name ``vllm`` and finds its platform by a ``+cpu`` in it; the CPU
    build's distribution has another name.

    Raises:
        KeyError: ``distribution`` is not in the folder.
    """
    version = installed(site_packages)[canonical(distribution)] + suffix
    for stale in site_packages.glob(f"{name}-*.dist-info"):
        shutil.rmtree(stale)
    folder = site_packages / f"{name}-{version}.dist-info"
    folder.mkdir()
    files = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "INSTALLER": "vllm-splint\n"}
    for file, content in files.items():
        (folder / file).write_text(content, encoding="utf-8")
    record = "".join(f"{folder.name}/{file},,\n" for file in (*files, "RECORD"))
    (folder / "RECORD").write_text(record, encoding="utf-8")
