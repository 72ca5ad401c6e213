"""``system_fingerprint`` with the patch set's identity behind it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import patches
from patches.framework import roster, settings
from patches.framework.arguments import Arguments
from patches.framework.records import Seam

__all__ = ["get_system_fingerprint", "identity"]

_MODULE = "vllm.entrypoints.serve.utils.fingerprint"
_FLAGS = ("--fingerprint-mode", "--fingerprint-value")
_DEFAULT = "full"


def identity() -> str:
    """``splint-<version>-<digest>``; the digest is the ``patch_set`` of the report."""
    return f"splint-{patches.__version__}-{roster.patch_set_digest(settings.get('SPLINT_PATCHES'))}"


def get_system_fingerprint(seam: Seam) -> Callable[[Any], str | None]:
    """Called once for each serving class at start; no request pays for it."""

    @wraps(seam.original)
    def with_identity(vllm_config: Any) -> str | None:
        seam.count()
        said: str | None = seam.original(vllm_config)
        return said if said is None or _operators_choice() else f"{said}+{identity()}"

    return with_identity


def _operators_choice() -> bool:
    """Whether the operator asked for a form of his own, the default by its name included."""
    mode = sys.modules[_MODULE]._DEFAULT_MODE
    return mode != _DEFAULT or any(Arguments(sys.argv).has(flag) for flag in _FLAGS)
