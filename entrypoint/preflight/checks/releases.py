"""The installed releases work together, and their sources are those that were reviewed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from entrypoint.preflight.check import REFUSE, Check, CheckFailedError, Evidence, always
from patches.framework.libraries import in_range

if TYPE_CHECKING:
    from entrypoint.preflight.subject import Subject

__all__ = ["CHECK", "PAIRS", "Pair"]


@dataclass(frozen=True)
class Pair:
    """Two ranges of releases that do not go together.

    Attributes:
        vllm: Releases of vLLM.
        lmcache: Releases of LMCache that do not work with them.
        connector: Only with this connector, or None for all.
        hybrid: Only for models with layers that keep a state (Mamba, GDN) beside attention.
        why: What goes wrong.
        remedy: What to install instead.
        upstream: Where it is discussed.
    """

    vllm: str
    lmcache: str
    why: str
    remedy: str
    upstream: tuple[str, ...] = ()
    connector: str | None = None
    hybrid: bool = False


PAIRS = (
    Pair(
        ">=0.29",
        "<0.5.5",
        "LMCache asks for the layout by a function that vLLM no longer has, swallows the error and guesses",
        "LMCache 0.5.5 or later.",
        ("LMCache#4870",),
    ),
    Pair(
        "<0.20",
        ">=0.4.7",
        "the connector for the LMCache server imports names that this vLLM does not have",
        "vLLM 0.22 or later, or an LMCache before 0.4.7.",
        connector="LMCacheMPConnector",
    ),
    Pair(
        ">=0.26",
        "<0.5.6",
        "the pages of hybrid models are stored in a shape that vLLM no longer uses: wrong tokens on every hit",
        "LMCache 0.5.6 or later.",
        ("LMCache#4247",),
        connector="LMCacheMPConnector",
        hybrid=True,
    ),
    Pair(
        "<0.22",
        ">=0",
        "the connector in this vLLM can't serve hybrid models ('failed to convert the KV cache specs' at start)",
        "vLLM 0.22.1 or later with LMCache 0.5.6 or later.",
        ("vllm#42911",),
        connector="LMCacheMPConnector",
        hybrid=True,
    ),
)


def unfit(subject: Subject) -> list[Pair]:
    """The pairs that the installed releases are one of, as far as the connector and the model matter."""
    vllm, lmcache = subject.vllm, subject.lmcache
    if vllm is None or lmcache is None or subject.lmcache_connector is None:
        return []
    return [
        pair
        for pair in PAIRS
        if in_range(vllm, pair.vllm)
        and in_range(lmcache, pair.lmcache)
        and pair.connector in (None, subject.lmcache_connector)
        and (not pair.hybrid or subject.model.hybrid)
    ]


def run(subject: Subject) -> Evidence:
    evidence = {"vllm": subject.vllm, "lmcache": subject.lmcache}
    if subject.vllm is None:
        raise CheckFailedError("no vLLM", "vLLM in this environment", "pip install vllm.", evidence)
    for pair in unfit(subject):
        raise CheckFailedError(f"vLLM {subject.vllm} with LMCache {subject.lmcache}: {pair.why}", "a pair that works",
                               f"Install {pair.remedy}", evidence)  # fmt: skip
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
