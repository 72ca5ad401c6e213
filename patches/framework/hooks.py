"""Post-import hooks on every target module, through wrapt."""

from __future__ import annotations

from types import ModuleType

from wrapt import register_post_import_hook

from patches.framework import process, timing
from patches.framework.errors import RefusedError

__all__ = ["install"]

_installed = False


def install() -> None:
    """Register one hook for each target module; a second call does nothing.

    A hook that raises fails the import of its module: nobody gets to use what could not be patched.
    """
    global _installed
    if _installed:
        return
    _installed = True
    with timing.phase("hooks"):
        application = process.start().application
        for module in application.modules():
            register_post_import_hook(_imported, module)


def _imported(module: ModuleType) -> None:
    state = process.start()
    with timing.phase("hooks"):
        try:
            state.application.imported(module)
        except RefusedError as error:
            state.refuse(error)
