"""Prints pins of the locks, in the form that pip and uv read.

``python3 -m containers.pins cpu --except lmcache``, or ``... cpu dev --only uv hatchling``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from envsetup import lockfile
from envsetup.lockfile import Pin

__all__ = ["chosen", "main"]

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"


def chosen(pins: dict[str, Pin], only: list[str], without: list[str]) -> list[Pin]:
    """The pins named in ``only`` (all where it is empty) less those in ``without``.

    Raises:
        KeyError: a name is in none of the locks.
    """
    left_out = {lockfile.canonical(name) for name in without}
    names = [lockfile.canonical(name) for name in only] or list(pins)
    for name in (*names, *left_out):
        if name not in pins:
            raise KeyError(f"{name} is in none of the locks read")
    return [pins[name] for name in names if name not in left_out]


def main() -> None:
    """Print the pins that the arguments choose."""
    parser = argparse.ArgumentParser(prog="python3 -m containers.pins", description=__doc__)
    parser.add_argument("locks", nargs="+", help="names of requirements/*.lock, read in this order")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--except", nargs="+", default=[], metavar="NAME", dest="without")
    arguments = parser.parse_args()
    pins: dict[str, Pin] = {}
    for name in arguments.locks:
        pins |= lockfile.read(REQUIREMENTS / f"{name}.lock")
    for pin in chosen(pins, arguments.only, arguments.without):
        print(pin)


if __name__ == "__main__":
    main()
