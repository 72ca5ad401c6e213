"""Post-import hooks on every target module, through wrapt."""

from __future__ import annotations

from types import ModuleType

from wrapt import register_post_import_hook

from patches.framework import process, timing
from patches.framework.errors import RefusedError

__all__ = ["install"]

_installed = False


def install(library: str) -> None:
    """Register one hook for each target module; a second call does nothing.

    ``library`` is the one whose import brought us here. A hook that raises fails the import of its module: nobody gets
    to use what could not be patched.
    """
    global _installed
    if _installed:
        return
    with timing.phase("hooks"):
        state = process.start()
        if library == "vllm":
            _check_environment(state)
        _installed = True
        for module in state.application.modules():
            register_post_import_hook(_imported, module)


def _check_environment(state: process.Process) -> None:
    try:
        state.check_environment()
    except RefusedError as error:
        state.refuse(error)


def _imported(module: ModuleType) -> None:
    state = process.start()
    with timing.phase("hooks"):
        try:
            state.application.imported(module)
        except RefusedError as error:
            state.refuse(error)
