"""The driver is new enough for the CUDA release that torch was built for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, DoesNotApplyError, Evidence
from entrypoint.preflight.packages import torch_build

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK"]


COMPATIBLE = Path("/usr/local/cuda/compat")
"""NVIDIA's package for newer CUDA on older drivers, as images carry it."""


def _major(release: str) -> int:
    head = release.partition(".")[0]
    return int(head) if head.isdecimal() else 0


def run(subject: Subject) -> Evidence:
    if subject.unreadable is not None:
        raise subject.unreadable
    if subject.machine is None:
        raise DoesNotApplyError(subject.no_gpu or "no GPU")
    release, cuda = torch_build()
    if cuda is None:
        raise DoesNotApplyError(f"torch {release} is not built for CUDA")
    machine = subject.machine
    evidence = {"driver": machine.driver, "driver_cuda": machine.cuda, "torch": release, "torch_cuda": cuda}
    if _major(machine.cuda) < _major(cuda) and COMPATIBLE.is_dir():
        raise DoesNotApplyError(f"{COMPATIBLE} may stand in for the driver's CUDA {machine.cuda}: matmul decides")
    if _major(machine.cuda) < _major(cuda):
        raise CheckFailedError(
            f"driver {machine.driver}, which brings CUDA {machine.cuda}, under torch {release} for CUDA {cuda}",
            f"a driver that brings CUDA {_major(cuda)} or later",
            "Install a newer driver, on data-centre GPUs also the package cuda-compat, or take an image for this CUDA.",
            evidence,
        )
    return evidence


CHECK = Check(
    "driver",
    "The driver can run what torch was built for.",
    REFUSE,
    25.0,
    lambda subject: subject.no_gpu,
    run,
)
