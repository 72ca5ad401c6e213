#!/usr/bin/env python3
"""For the bill of materials: copies the metadata of an image's distributions, and stands for its interpreter.

``metadata.py FOLDER`` copies; called as cyclonedx-py calls an interpreter (``-c CODE``), it prints its one folder.
"""

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

FOLDER = "/metadata"


def collect(path: Iterable[str], folder: Path) -> None:
    """Copy every ``*.dist-info`` of an import path; of two with one name, the one that is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    for info in (info for entry in path for info in sorted(Path(entry).glob("*.dist-info"))):
        if not (folder / info.name).exists():
            shutil.copytree(info, folder / info.name, ignore=shutil.ignore_patterns("RECORD"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["-c"]:
        print(json.dumps([FOLDER]))
    else:
        collect(sys.path[1:], Path(sys.argv[1]))
