"""LMCache's compiled operations load: without them it goes on with slow or unfit ones and says so in a log line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.preflight import packages
from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, DoesNotApplyError, Evidence
from entrypoint.preflight.checks.torch_abi import LIMIT_S, load

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK"]

_HINT = (
    "Install an LMCache that was built for this torch and CUDA (pip install --no-deps lmcache, or build it from source "
    "with --no-build-isolation)."
)


def applies(subject: Subject) -> str | None:
    """Only a server with an LMCache connector loads them."""
    if subject.lmcache is None:
        return "LMCache is not installed" if subject.lmcache_connector is None else None
    return None if subject.thorough or subject.lmcache_connector else "no LMCache connector"


def run(subject: Subject) -> Evidence:
    if subject.lmcache is None:
        raise CheckFailedError("no LMCache", f"the package for {subject.lmcache_connector}", "pip install lmcache.")
    # Operations on GPU memory are in a file of their own, which no CPU can load.
    on_gpu = ("cuda_ops.*.so", "c_ops.*.so") if subject.no_gpu is None else ()
    files = packages.native("lmcache", "lmcache_native.*.so", "native_storage_ops.*.so", *on_gpu)
    if on_gpu and not packages.native("lmcache", *on_gpu):
        raise CheckFailedError(f"LMCache {subject.lmcache} without operations for GPUs", "c_ops or cuda_ops", _HINT)
    if not files:
        raise DoesNotApplyError(f"LMCache {subject.lmcache} has no compiled code")
    return load(files, subject, _HINT)


CHECK = Check("lmcache_ops", "LMCache's compiled operations load.", REFUSE, LIMIT_S + 5, applies, run)
