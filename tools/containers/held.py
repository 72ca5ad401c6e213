"""Prints pip constraints that hold an image's distributions where they are: ``python3 -m containers.held MAY_MOVE...``.

Patterns name what pip may move because LMCache caps it; torch and vLLM can't be among them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from importlib.metadata import distributions

from envsetup.lockfile import canonical

__all__ = ["FIXED", "constraints", "installed", "main"]

FIXED = ("torch", "vllm")
"""Never moved, whatever the patterns say."""


def installed() -> dict[str, str]:
    """Versions of this interpreter's distributions by canonical name; of two, the one that is imported."""
    found: dict[str, str] = {}
    for distribution in distributions():
        found.setdefault(canonical(distribution.metadata["Name"]), distribution.version)
    return found


def constraints(versions: Mapping[str, str], may_move: Iterable[str]) -> list[str]:
    """``name==version`` for every distribution that no pattern in ``may_move`` releases.

    Raises:
        ValueError: torch or vLLM is not installed, or a pattern would release one of them.
    """
    patterns = [pattern.lower() for pattern in may_move]
    missing = [name for name in FIXED if name not in versions]
    if missing:
        raise ValueError(f"{', '.join(missing)} not installed: the base image is no vLLM image. Set BASE_IMAGE to one.")
    free = {name for name in versions if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if moved := free.intersection(FIXED):
        raise ValueError(f"MAY_MOVE releases {', '.join(sorted(moved))}, which must stay as the base has it.")
    return [f"{name}=={version}" for name, version in sorted(versions.items()) if name not in free]


def main() -> None:
    """Print the constraints; an error goes to stderr and ends with 1."""
    try:
        print("\n".join(constraints(installed(), sys.argv[1:])))
    except ValueError as error:
        sys.exit(f"containers.held: {error}")


if __name__ == "__main__":
    main()
