"""Each GPU has free what ``--gpu-memory-utilization`` asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, DoesNotApplyError, Evidence, on_gpus
from patches.framework.libraries import in_range

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK"]

FLAG = "--gpu-memory-utilization"
_DEFAULT = 0.92
_DEFAULT_BEFORE_0_22 = 0.9


def utilisation(subject: Subject) -> float:
    """The part of each GPU's memory that vLLM will take.

    Raises:
        DoesNotApplyError: the flag is no part; vLLM says so.
    """
    text = subject.arguments.value(FLAG)
    if text is None:
        old = subject.vllm is not None and in_range(subject.vllm, "<0.22")
        return _DEFAULT_BEFORE_0_22 if old else _DEFAULT
    try:
        return float(text)
    except ValueError:
        raise DoesNotApplyError(f"{FLAG} {text} is no number") from None


def run(subject: Subject) -> Evidence:
    if "MIG" in subject.environ.get("CUDA_VISIBLE_DEVICES", ""):
        raise DoesNotApplyError("parts of GPUs (MIG) are not read")
    part = utilisation(subject)
    used = subject.gpus[: subject.workers]
    evidence = {f"gpu{gpu.index}": {"free_mib": gpu.free_mib, "wanted_mib": int(part * gpu.usable_mib)} for gpu in used}
    short = [gpu for gpu in used if gpu.free_mib < part * gpu.usable_mib]
    if short:
        raise CheckFailedError(
            "; ".join(f"GPU {gpu.index}: {gpu.free_mib} MiB free of {gpu.usable_mib}" for gpu in short),
            f"{part:g} of each GPU's memory ({FLAG})",
            f"End what holds the memory (check foreign), or lower {FLAG} on every rank alike.",
            evidence,
        )
    return evidence


CHECK = Check("memory", "Each GPU has the memory free that the server will take.", REFUSE, 25.0, on_gpus, run)
