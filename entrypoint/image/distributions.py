"""What is installed in this environment, and what moved since a list was written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from patches.framework.errors import SplintError

__all__ = ["Changes", "changes", "installed", "listed"]

_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==(\S+)")


@dataclass(frozen=True)
class Changes:
    """Distributions by name: what came, and what was there before and is not now as it was (then, now)."""

    added: dict[str, str]
    moved: dict[str, tuple[str, str | None]]


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Version by normalised name of every distribution on the path; of two with one name the first is imported."""
    found: dict[str, str] = {}
    for distribution in distributions():
        found.setdefault(_normalised(distribution.name), distribution.version)
    return found


def listed(path: Path) -> dict[str, str]:
    """The distributions in a list that ``pip list --format=freeze`` wrote.

    Raises:
        SplintError: the file is missing, empty or holds another form of line.
    """
    remedy = "Write it with `python3 -m pip list --format=freeze` before anything is installed."
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise SplintError(f"{path}: {error.strerror}", "the list of what was installed before", remedy) from error
    matches = {line: _LINE.fullmatch(line.strip()) for line in lines if line.strip()}
    odd = [line for line, match in matches.items() if match is None]
    if odd or not matches:
        found = f"the line {odd[0]!r}" if odd else "nothing"
        raise SplintError(f"{found} in {path}", "lines of name==version", remedy)
    return {_normalised(match[1]): match[2] for match in matches.values() if match}


def changes(before: dict[str, str], now: dict[str, str]) -> Changes:
    """What came and what moved between two lists."""
    moved = {name: (version, now.get(name)) for name, version in before.items() if now.get(name) != version}
    return Changes({name: version for name, version in now.items() if name not in before}, moved)
