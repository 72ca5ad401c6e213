from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from patches.framework.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from patches.framework.records import Seam

__all__ = ["AmxPermissionError", "init_device", "needs_permission"]


class AmxPermissionError(RefusedError):
    """The CPU has AMX and the kernel does not let this process use it: the first AMX instruction would be SIGILL."""


def needs_permission() -> str | None:
    """None where vLLM picks AMX kernels on this machine, else why it does not."""
    import torch

    return None if torch.cpu._is_amx_tile_supported() else "this CPU has no AMX tiles"


def init_device(seam: Seam) -> Callable[[Any], None]:
    """Wrap ``CPUWorker.init_device``.

    The permission belongs to the process: every thread that runs kernels later has it.
    """

    @wraps(seam.original)
    def init_device(self: Any) -> None:
        seam.count()
        _ask_for_tiles()
        seam.original(self)

    return init_device


def _ask_for_tiles() -> None:
    import torch

    if not torch.cpu._init_amx():
        raise AmxPermissionError(
            "this CPU has AMX, but the kernel refused this process the permission to use its tiles",
            "the permission arch_prctl(ARCH_REQ_XCOMP_PERM), without which the first AMX kernel ends in SIGILL",
            "Allow the system call arch_prctl in the container's seccomp profile and use Linux 5.16 or later. An "
            "unquantised model served with --dtype float32 uses no AMX kernel: there the patch can be left out with "
            "SPLINT_PATCHES=-cpu_amx_permission.",
        )
