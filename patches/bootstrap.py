"""What the installed ``.pth`` line runs at the start of every Python process of the environment.

Standard library only. A process that imports neither vLLM nor LMCache pays for one entry in ``sys.meta_path``;
the rest is loaded when either package is first looked for. A serving command is put under a supervising parent first.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock

__all__ = ["start", "started"]

LIBRARIES = ("vllm", "lmcache")
_started = False


class _FirstLook:
    """Registers the post-import hooks when vLLM or LMCache is first looked for, and is gone afterwards."""

    def __init__(self) -> None:
        # Another thread that looks for the other library must not get past the hooks while they are registered.
        self._lock = RLock()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name not in LIBRARIES:
            return
        with self._lock:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _install(name)


def _install(library: str) -> None:
    from patches.framework import timing

    with timing.phase("hooks"):
        from patches.framework import hooks

        hooks.install(library)


def started() -> bool:
    """Whether the start-up hooks ran in this process."""
    return _started


def start() -> None:
    """Watch for vLLM and LMCache.

    A second call does nothing: a venv whose ``lib64`` links to ``lib`` runs the line twice.
    """
    global _started
    if _started or os.environ.get("SPLINT_MODE") == "off":
        return
    _started = True
    from patches import supervision

    if supervision.is_serving_command(sys.orig_argv):
        _check_settings()
        supervision.supervise()
    sys.meta_path.insert(0, _FirstLook())


def _check_settings() -> None:
    """A server with a malformed setting ends before it begins, with one line instead of a traceback."""
    from patches.framework.errors import EXIT_REFUSED, SettingError
    from patches.framework.selection import check_settings

    try:
        check_settings()
    except SettingError as error:
        print(f"splint: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_REFUSED)
