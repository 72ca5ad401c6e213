"""What the installed ``.pth`` line runs at the start of every Python process of the environment.

Standard library only. A process that imports neither vLLM nor LMCache pays for one entry in ``sys.meta_path``;
the rest is loaded when either package is first looked for. A serving command is put under a supervising parent first.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from patches.framework.arguments import Arguments

__all__ = ["start", "started"]

LIBRARIES = ("vllm", "lmcache")
SHARED = (
    "dataclasses",
    "importlib.metadata",
    "importlib.resources",
    "inspect",
    "json",
    "logging",
    "socket",
    "tempfile",
)
"""Parts of Python's library that vLLM imports anyway: here they only come earlier, so they are no work of ours."""
_OURS = ("patches", "patches.bootstrap", "patches.supervision")
# On sys, because this module may be loaded twice: it steps aside between its start and the first look.
_STARTED = "_splint_started"


class _FirstLook:
    """Has the post-import hooks registered before vLLM or LMCache is first imported, and is gone afterwards.

    Python searches under its global import lock. Importing the hooks there would wait for ever for a thread that is
    importing one of their modules and needs that lock to go on; so they are imported by the loader, which holds none.

    The package's name is a common one. A program must find its own ``patches``, so ours steps aside until then.
    """

    def __init__(self) -> None:
        self._modules = _step_aside()
        # Another thread that imports the other library must not get past the hooks while they are registered.
        self._lock = RLock()
        self._begun = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in LIBRARIES:
            return None
        spec = self.search(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _HooksFirst(self, spec.loader)  # type: ignore[assignment]  # it has what the import system calls
        return spec

    def search(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What all other finders know of ``name``."""
        for finder in list(sys.meta_path):
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def install(self, name: str) -> None:
        """Register the hooks, once; where that fails, every import of a library fails with the same error."""
        with self._lock:
            if self._begun or self not in sys.meta_path:
                return
            self._begun = True
            try:
                self._step_in()
                _install(name)
                sys.meta_path.remove(self)
            finally:
                self._begun = False

    def _step_in(self) -> None:
        """Put our modules back. Raises ImportError where the program has loaded another package of that name."""
        for name, module in self._modules.items():
            found = sys.modules.setdefault(name, module)
            if found.__file__ != module.__file__:
                raise ImportError(
                    f"a foreign package {name!r} ({found.__file__}) was imported before vLLM; wanted vllm-splint's."
                    f" Rename it, or set SPLINT_MODE=off for stock vLLM."
                )


class _HooksFirst:
    """The library's own loader, but for the hooks, which come first."""

    def __init__(self, first: _FirstLook, loader: Loader) -> None:
        self._first = first
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        self._first.install(spec.name)
        # Searched anew, so that a hook on the library itself takes part.
        found = self._first.search(spec.name)
        spec.loader = found.loader if found is not None else self._loader
        return self._loader.create_module(spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _step_aside() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in _OURS if name in sys.modules}


def _install(library: str) -> None:
    from importlib import import_module

    for name in SHARED:
        import_module(name)
    from patches.framework import timing

    with timing.phase("hooks"):
        from patches.framework import hooks

        hooks.install(library)


def started() -> bool:
    """Whether the start-up hooks ran in this process."""
    return hasattr(sys, _STARTED)


def start() -> None:
    """Watch for vLLM and LMCache.

    A second call does nothing: a venv whose ``lib64`` links to ``lib`` runs the line twice.
    """
    if os.environ.get("SPLINT_MODE") == "off":
        return
    if started():
        # This is a second copy of the module, so the finder's class is known by its name alone.
        if any(type(finder).__name__ == _FirstLook.__name__ for finder in sys.meta_path):
            _step_aside()
        return
    setattr(sys, _STARTED, True)
    from patches import supervision

    serving = supervision.is_serving_command(sys.orig_argv)
    program, words = supervision.vllm_program(sys.orig_argv)
    cache_server = "" if program else supervision.cache_server(sys.orig_argv)
    if program or cache_server:
        _check_command(program or cache_server, words, serving=serving, settings=serving or bool(cache_server))
    if serving:
        supervision.supervise()
    sys.meta_path.insert(0, _FirstLook())


def _check_command(program: str, words: list[str], *, serving: bool, settings: bool) -> None:
    """A server with a malformed setting, or out of the gate's reach, ends before it begins: one line, no traceback."""
    from patches.framework import log
    from patches.framework.errors import EXIT_REFUSED, RefusedError

    try:
        _check_reach(program, words, serving=serving)
        if settings:
            _check_settings()
        if serving:
            _pin_kv_dtype(words)
    except RefusedError as error:
        log.tell("refused", f"{error}")
        os._exit(EXIT_REFUSED)


def _check_reach(program: str, words: list[str], *, serving: bool) -> None:
    from patches.framework import log, reach
    from patches.framework.errors import EnvironmentRefusedError

    try:
        reach.check_command(program, words)
        if serving:
            reach.check(_arguments(words), os.environ)
    except EnvironmentRefusedError as error:
        if os.environ.get("SPLINT_MODE") != "report":
            raise
        log.tell("refused", f"{error}", mode="report")


def _arguments(words: list[str]) -> Arguments:
    from patches.framework.arguments import Arguments

    return Arguments(words[1:] if words[:1] == ["serve"] else words)


def _pin_kv_dtype(words: list[str]) -> None:
    """Add to the command line, which vLLM has not read yet, what ``SPLINT_KV_DTYPE`` asks for."""
    if os.environ.get("SPLINT_KV_DTYPE"):
        from patches.framework import kv_dtype

        end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
        sys.argv[end:end] = kv_dtype.words(_arguments(words), os.environ)


def _check_settings() -> None:
    from patches.framework.selection import check_settings

    check_settings()
    _say_what_is_off()


def _say_what_is_off() -> None:
    from patches import PATCH_IDS
    from patches.framework import log, settings
    from patches.framework.selection import selected

    off = [name for name in PATCH_IDS if name not in selected(settings.get("SPLINT_PATCHES"))]
    if off:
        log.tell("left out", f"left out by SPLINT_PATCHES: {', '.join(off)}", patches=off)
