"""The installed releases work together, and their sources are those that were reviewed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, Evidence, always
from entrypoint.preflight.pairs import IN_PROCESS, Use, judge, remedy
from patches.framework import settings
from patches.framework.libraries import in_range

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK", "unfit", "use_of"]


def use_of(subject: Subject) -> Use | None:
    """The installed pair and what this server does with it; None where it does nothing with LMCache."""
    vllm, lmcache, connector = subject.vllm, subject.lmcache, subject.lmcache_connector
    if vllm is None or lmcache is None or connector is None or _may_leave_out(subject):
        return None
    return Use(vllm, lmcache, connector, hybrid=subject.model.hybrid, latent=subject.model.latent)


def _may_leave_out(subject: Subject) -> bool:
    """Whether the connector is dropped where it does not fit (patch lmcache_in_process)."""
    asked = settings.get("SPLINT_LMCACHE_IN_PROCESS", subject.environ) == "leave_out"
    return asked and subject.lmcache_connector == IN_PROCESS and in_range(subject.vllm or "0", ">=0.32") is True


def unfit(subject: Subject) -> list[str]:
    """What is wrong with the installed pair of releases, as far as the connector and the model matter."""
    use = use_of(subject)
    return [] if use is None else judge(use)


def run(subject: Subject) -> Evidence:
    evidence = {"vllm": subject.vllm, "lmcache": subject.lmcache}
    if subject.vllm is None:
        raise CheckFailedError("no vLLM", "vLLM in this environment", "pip install vllm.", evidence)
    use = use_of(subject)
    if use is not None and (faults := judge(use)):
        found = f"vLLM {use.vllm} with LMCache {use.lmcache} and {use.connector}: {'; '.join(faults)}"
        raise CheckFailedError(found, "a pair that is known to work", remedy(use), evidence)
    refused = _refused(subject)
    if refused:
        raise CheckFailedError(
            "; ".join(refused), "sources that were reviewed", "Install a reviewed release.", evidence
        )
    return evidence


def _refused(subject: Subject) -> list[str]:
    from entrypoint.tables import patch_rows

    libraries = {"vllm"} if subject.lmcache_connector is None else {"vllm", "lmcache"}
    return [
        f"{row.patch.id}: {row.reason}"
        for row in patch_rows()
        if row.state == "refused" and row.patch.library in libraries
    ]


CHECK = Check(
    "releases", "vLLM and LMCache fit each other, and every needed patch fits them.", REFUSE, 20.0, always, run
)
