"""Release, device and model can keep the KV cache in the dtype that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from entrypoint.preflight import packages
from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, Evidence, always
from patches.framework.kv_dtype import AUTO, MODEL, is_quantised
from patches.framework.libraries import in_range

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK"]

_HINT = "Choose another --kv-cache-dtype, or SPLINT_KV_DTYPE=model."
_ON_CPU = {"fp8", "fp8_e4m3", "fp8_e5m2"}
_CPU_HEAD_MULTIPLE = 32
_OF_MLA = {"fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"}
_NAMES = {"half": "float16", "float": "float32"}


def _release(subject: Subject, name: str) -> str | None:
    known = packages.kv_dtypes()
    if known and name not in known:
        return f"vLLM {subject.vllm} knows no KV dtype {name}, but {', '.join(sorted(known))}"
    return None


def _model(subject: Subject, name: str) -> str | None:
    """vLLM reinterprets the bits of one 16-bit dtype as the other's (vllm#54338): fluent nonsense, no error."""
    given = subject.arguments.value("--dtype") or AUTO
    own = subject.model.dtype if given == AUTO else _NAMES.get(given, given)
    if own in ("float16", "bfloat16") and not is_quantised(name) and name not in (AUTO, own):
        return f"a KV cache in {name} for a model that computes in {own}: vLLM would read one's bits as the other's"
    if subject.model.latent and is_quantised(name) and name not in _OF_MLA:
        return f"{name} for a model with multi-head latent attention, whose kernels know {', '.join(sorted(_OF_MLA))}"
    return None


def _cpu(subject: Subject, name: str) -> str | None:
    if subject.vllm is None or "cpu" not in subject.vllm or not is_quantised(name):
        return None
    head = subject.model.head_size
    reasons = {
        f", whose attention knows {', '.join(sorted(_ON_CPU))}": name not in _ON_CPU,
        " for a model with multi-head latent attention": subject.model.latent,
        f" with vLLM {subject.vllm}, which goes back to auto without a word": in_range(subject.vllm, "<0.22"),
        " without AVX-512": "avx512f" not in Path("/proc/cpuinfo").read_text(encoding="utf-8").split(),
        f" for heads of {head} elements, no multiple of {_CPU_HEAD_MULTIPLE}": head and head % _CPU_HEAD_MULTIPLE,
    }
    return next((f"{name} on the CPU{reason}" for reason, holds in reasons.items() if holds), None)


_RULES: tuple[Callable[[Subject, str], str | None], ...] = (_release, _model, _cpu)


def run(subject: Subject) -> Evidence:
    asked = subject.cache_dtype
    name = AUTO if asked == MODEL else asked
    declared = subject.model.declared_kv_quantisation
    evidence = {
        "asked": asked,
        "declared": declared,
        "model_dtype": subject.arguments.value("--dtype") or subject.model.dtype,
        "head_size": subject.model.head_size,
    }
    complaints = [complaint for rule in _RULES if (complaint := rule(subject, name))]
    if complaints:
        raise CheckFailedError("; ".join(complaints), "a KV dtype that all of them support", _HINT, evidence)
    return evidence


CHECK = Check("kv_dtype", "Release, device and model support the KV cache's dtype.", REFUSE, 10.0, always, run)
