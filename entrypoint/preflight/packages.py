"""Where packages lie and what their files say, without an import: that of vLLM takes longer than all checks."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

__all__ = ["folder", "kv_dtypes", "native", "torch_build"]


def folder(package: str) -> Path | None:
    """The package's folder, or None where it is not installed."""
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def native(package: str, *patterns: str) -> list[Path]:
    """The package's compiled files that match any of the patterns."""
    place = folder(package)
    return sorted(path for pattern in patterns for path in place.glob(pattern)) if place else []


def torch_build() -> tuple[str, str | None]:
    """torch's release, and the CUDA release that it was built for (``"12.9"``), or None for a CPU build."""
    place = folder("torch")
    text = (place / "version.py").read_text(encoding="utf-8") if place else ""
    release = re.search(r"__version__ = '([^']*)'", text)
    cuda = re.search(r"^cuda: [^=]*= '([^']*)'", text, re.MULTILINE)
    return release[1] if release else "", cuda[1] if cuda else None


def kv_dtypes() -> frozenset[str]:
    """The names that the installed vLLM takes for ``--kv-cache-dtype``; empty where its source says it otherwise."""
    place = folder("vllm")
    text = (place / "config" / "cache.py").read_text(encoding="utf-8") if place else ""
    found = re.search(r"^CacheDType = Literal\[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'"(\w+)"', found[1])) if found else frozenset()
