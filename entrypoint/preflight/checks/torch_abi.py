"""vLLM's compiled code fits the installed torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from entrypoint.preflight import packages
from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, DoesNotApplyError, Evidence, always
from entrypoint.preflight.isolated import probe

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK", "LIMIT_S", "load"]

LIMIT_S = 120.0
"""Most of it for reading torch's libraries from a slow disk the first time."""
_HINT = (
    "Install vLLM and torch as one locked set: one of them was moved after the other was built (pip check, pip list)."
)


def load(files: list[Path], subject: Subject, hint: str) -> Evidence:
    """Load each file beside torch, each in a process of its own, with every symbol resolved.

    Raises:
        CheckFailedError: one does not load; the loader's words are in it.
    """

    def one(file: Path) -> Evidence:
        found = probe("load", str(file), limit_s=LIMIT_S, environ=subject.environ, hint=hint)
        if found["error"]:
            raise CheckFailedError(f"{file.name} does not load: {found['error']}", "every symbol resolved", hint, found)
        return found

    with ThreadPoolExecutor(len(files)) as pool:
        return {file.name: found["seconds"] for file, found in zip(files, pool.map(one, files), strict=True)}


def _files(subject: Subject) -> list[Path]:
    """On the CPU the one of three builds that vLLM takes for this processor, on GPUs what every model needs."""
    if subject.vllm is None or "cpu" not in subject.vllm:
        return packages.native("vllm", "_C.*.so", "_C_stable_libtorch.*.so", "_moe_C.*.so")
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    name = "_C" if "avx512_bf16" in flags else "_C_AVX512" if "avx512f" in flags else "_C_AVX2"
    return packages.native("vllm", f"{name}.*.so") or packages.native("vllm", "_C.*.so")


def run(subject: Subject) -> Evidence:
    files = _files(subject)
    if not files:
        raise DoesNotApplyError("this vLLM has no compiled code")
    return {"torch": packages.torch_build()[0], "seconds": load(files, subject, _HINT)}


CHECK = Check("torch_abi", "vLLM's compiled code loads beside this torch.", REFUSE, LIMIT_S + 5, always, run)
