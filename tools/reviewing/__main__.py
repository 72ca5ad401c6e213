"""Writes the reviewed files of the releases that a patch covers, and shows what there is to read: ``make review``.

Each release's own sources are fetched and fingerprinted, and its file in ``patches/reviewed`` is written. What other
patches recorded there stays. A function whose text was reviewed in another release needs no second reading; every other
one is listed as such, and ``--diff`` prints how it differs from the release before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import patches
from patches.framework.records import Patch
from reviewing.readings import readings

EXIT_USAGE = 2


def _records(names: Sequence[str]) -> list[Patch]:
    known = {patch.id: patch for patch in patches.catalogue() if patch.library == "vllm"}
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        found = f"no patch of vLLM is called {', '.join(unknown)}" if unknown else "no patch is named"
        raise LookupError(f"{found}; wanted PATCHES=a,b of {', '.join(known)}")
    return [known[name] for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, list, and with ``--diff`` show; 2 where a patch is not known."""
    parser = argparse.ArgumentParser(prog="make review", description=__doc__)
    parser.add_argument("--patches", default="", help="comma-separated patches that were, or will be, read")
    parser.add_argument("--releases", default="", help="only these, separated by blanks")
    parser.add_argument("--diff", action="store_true", help="print what is to be read")
    given = parser.parse_args(arguments)
    try:
        records = _records([name for name in given.patches.split(",") if name])
    except LookupError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    for reading in readings(records, given.releases.split()):
        print(reading, flush=True)
        if given.diff and not reading.like:
            print(reading.diff(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
