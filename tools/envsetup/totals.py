"""Adds up pytest's result files and prints one closing line: ``python -m envsetup.totals FOLDER``."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

__all__ = ["main", "totals"]


def totals(folder: Path) -> Counter[str]:
    """Counts of ``tests``, ``failures``, ``errors`` and ``skipped``, and the seconds, over the suites in ``folder``."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.glob("*.xml")):
        for suite in ET.parse(path).getroot().iter("testsuite"):  # noqa: S314 - written by our own pytest run
            counts.update({key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")})
            counts["seconds"] += round(float(suite.get("time", 0)))
    return counts


def main() -> int:
    """Print the line; 1 where something failed or nothing ran."""
    counts = totals(Path(sys.argv[1]))
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    print(f"tests took {counts['seconds']} s")
    print(f"{passed} passed, {failed} failed, {counts['skipped']} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
