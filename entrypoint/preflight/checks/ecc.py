"""No GPU has memory that is known to be bad."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, DoesNotApplyError, Evidence, on_gpus

if TYPE_CHECKING:
    from entrypoint.preflight.nvidia import Gpu
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK"]


def _faults(gpu: Gpu) -> list[str]:
    found = []
    if gpu.uncorrected:
        found.append(f"{gpu.uncorrected} uncorrectable memory errors")
    if gpu.remap_pending:
        found.append("a row that waits to be remapped")
    if gpu.remap_failed:
        found.append("a row that could not be remapped")
    return found


def run(subject: Subject) -> Evidence:
    reporting = [gpu for gpu in subject.gpus if (gpu.uncorrected, gpu.remap_pending) != (None, None)]
    if not reporting:
        raise DoesNotApplyError("no visible GPU reports memory errors")
    evidence = {f"gpu{gpu.index}": _faults(gpu) for gpu in reporting}
    bad = [f"GPU {gpu.index} ({gpu.uuid}): {', '.join(_faults(gpu))}" for gpu in reporting if _faults(gpu)]
    if bad:
        raise CheckFailedError(
            "; ".join(bad),
            "memory without known faults",
            "Reset the GPU (drain the node first) or replace it.",
            evidence,
        )
    return evidence


CHECK = Check("ecc", "No GPU has uncorrectable memory errors or rows to be remapped.", REFUSE, 25.0, on_gpus, run)
