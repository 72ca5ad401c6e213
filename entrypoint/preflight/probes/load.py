"""Load one compiled file beside torch's libraries, with every symbol resolved: ``load <file>``."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time

from entrypoint.preflight.packages import native
from patches.supervision.processes import die_with_parent


def _load(file: str) -> str:
    """The loader's complaint, or nothing. torch itself is not imported: that takes ten times as long."""
    try:
        for library in native("torch", "lib/libtorch_python.so"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(file, mode=os.RTLD_NOW)
    except OSError as error:
        return str(error)
    return ""


def main() -> None:
    """Run, and print what came out."""
    die_with_parent(signal.SIGKILL)
    start = time.perf_counter()
    error = _load(sys.argv[1])
    print(json.dumps({"error": error, "seconds": round(time.perf_counter() - start, 3)}))


if __name__ == "__main__":
    main()
