"""Each GPU multiplies matrices right."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, Evidence, on_gpus
from entrypoint.preflight.isolated import probe

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK", "one"]

LIMIT_S = 180.0
"""Most of it for reading torch from a slow disk the first time."""
_HINT = "Look at dmesg (Xid) and nvidia-smi; reset or leave out that GPU (CUDA_VISIBLE_DEVICES)."


def one(subject: Subject, device: str) -> Evidence:
    """Multiply on one device, in a process of its own, so that a wedged one names itself.

    Raises:
        CheckFailedError: the product is wrong, or there is none.
    """
    try:
        found = probe("matmul", device, limit_s=LIMIT_S, environ=subject.environ, hint=_HINT)
    except CheckFailedError as error:
        raise CheckFailedError(f"{device}: {error.found}", error.wanted, error.hint) from error
    if found["wrong"]:
        raise CheckFailedError(
            f"{device}: {found['wrong']} of {found['cells']} cells wrong, {found['not_finite']} not finite",
            "a product of small whole numbers, which is exact",
            _HINT,
            found,
        )
    return found


def run(subject: Subject) -> Evidence:
    devices = [f"cuda:{device}" for device in range(len(subject.gpus))]
    with ThreadPoolExecutor(len(devices)) as pool:
        return dict(zip(devices, pool.map(lambda device: one(subject, device), devices), strict=True))


CHECK = Check("matmul", "A matrix product on each GPU is finite and exact.", REFUSE, LIMIT_S + 10, on_gpus, run)
