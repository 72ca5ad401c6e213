"""What the installed ``.pth`` line runs at the start of every Python process of the environment.

Standard library only. A process that imports neither vLLM nor LMCache pays for one entry in ``sys.meta_path``;
the rest is loaded when either package is first looked for. A serving command is put under a supervising parent first.
"""

from __future__ import annotations

import os
import sys
import threading

__all__ = ["start", "started"]

LIBRARIES = ("vllm", "lmcache")
_started = False


class _FirstLook:
    """Registers the post-import hooks when vLLM or LMCache is first looked for, and is gone afterwards."""

    def __init__(self) -> None:
        # Another thread that looks for the other library must not get past the hooks while they are registered.
        self._lock = threading.RLock()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name not in LIBRARIES:
            return
        with self._lock:
            if self in sys.meta_path:
                sys.meta_path.remove(self)  # type: ignore[arg-type]
                from patches.framework import hooks

                hooks.install()


def started() -> bool:
    """Whether the start-up hooks ran in this process."""
    return _started


def start() -> None:
    """Watch for vLLM and LMCache. A second call does nothing: a venv whose ``lib64`` links to ``lib`` runs the line twice."""
    global _started
    if _started or os.environ.get("SPLINT_MODE") == "off":
        return
    _started = True
    if len(sys.orig_argv) > 2:
        from patches import supervision

        if supervision.is_serving_command(sys.orig_argv):
            supervision.supervise()
    sys.meta_path.insert(0, _FirstLook())  # type: ignore[arg-type]
