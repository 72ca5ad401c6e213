"""A small library to patch, with its own reviewed fingerprints."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from patches.framework import fingerprints, libraries
from patches.framework.records import Patch, Role, Seam, Target

SOURCE = '''
import functools

def greet(name):
    """Say hello."""
    return "hello " + name

@functools.lru_cache
def cached(name):
    return "cached " + name

class Shop:
    def price(self, item):
        return len(item)

    @staticmethod
    def tax(amount):
        return amount // 10
'''


def shout(seam: Seam) -> Callable[..., str]:
    def shouting(*args: Any) -> str:
        seam.count()
        return str(seam.original(*args)).upper()

    return shouting


def double(seam: Seam) -> Callable[..., int]:
    def doubled(*args: Any) -> int:
        seam.count()
        return 2 * int(seam.original(*args))

    return doubled


def discount(seam: Seam) -> Callable[..., int]:
    def discounted(_self: Any, item: str) -> int:
        seam.count()
        return len(item) - 1

    return discounted


class Pretend:
    """A library ``pretendlib`` in a temporary folder, release 1.0, reviewed as it stands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "pretendlib" / "core.py"
        self.file.parent.mkdir()
        (self.file.parent / "__init__.py").write_text("")
        (self.file.parent / "late.py").write_text("def closing():\n    return 'bye'\n")
        self.file.write_text(SOURCE)
        metadata = folder / "pretendlib-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pretendlib\nVersion: 1.0\n")
        self.reviewed = folder / "reviewed"
        self.reviewed.mkdir()

    def review(self, *qualnames: str, module: str = "pretendlib.core", release: str = "1.0") -> None:
        """Review the source as it stands now."""
        taken = fingerprints.take(tuple(f"{module}:{name}" for name in qualnames))
        data = {"library": "pretendlib", "release": release, **taken}
        (self.reviewed / f"pretendlib-{release}.json").write_text(json.dumps(data))
        fingerprints.reviewed.cache_clear()

    def change(self, old: str, new: str) -> None:
        self.file.write_text(self.file.read_text().replace(old, new))

    def add(self, text: str) -> None:
        self.file.write_text(self.file.read_text() + textwrap.dedent(text))

    def load(self, name: str = "pretendlib.core") -> ModuleType:
        importlib.invalidate_caches()
        return importlib.import_module(name)


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    library = Pretend(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fingerprints, "REVIEWED_FOLDER", library.reviewed)
    monkeypatch.setitem(libraries.DISTRIBUTIONS, "pretendlib", ("pretendlib",))
    fingerprints.reviewed.cache_clear()
    libraries.installed_version.cache_clear()
    yield library
    for name in [name for name in sys.modules if name.startswith("pretendlib")]:
        del sys.modules[name]
    fingerprints.reviewed.cache_clear()
    libraries.installed_version.cache_clear()


def make_patch(*targets: Target, patch_id: str = "loud", releases: str = ">=1", **fields: Any) -> Patch:
    return Patch(
        id=patch_id,
        purpose="Make it loud.",
        fault="It is quiet.",
        library="pretendlib",
        releases=releases,
        targets=targets,
        roles=frozenset({Role.WORKER}),
        retires="never",
        exercised_by="the tests",
        **fields,
    )


def make_target(qualname: str, factory: str, module: str = "pretendlib.core", **fields: Any) -> Target:
    return Target(module, qualname, f"{__name__}:{factory}", **fields)


@pytest.fixture
def patch() -> Callable[..., Patch]:
    return make_patch


@pytest.fixture
def target() -> Callable[..., Target]:
    return make_target
