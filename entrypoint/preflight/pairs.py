"""Which releases of vLLM and LMCache go together: what was run, parsed or reported, as data.

Read in the wheels of vLLM 0.19.1, 0.22.1, 0.25.1, 0.28.0, 0.30.0, 0.32.0 and 0.33.0 and of LMCache 0.4.7, 0.5.2, 0.5.5
and 0.5.6; of the releases between them nothing else was reported. LMCache before 0.4.7 is out of scope; from 0.4.7 to
0.5.5 it is in none of this project's patches, so in enforce mode only 0.5.6 serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from patches.framework.libraries import in_range

__all__ = ["BROKEN", "GOOD", "IN_PROCESS", "MULTI_PROCESS", "Broken", "Good", "Use", "judge", "nearest", "remedy"]

MULTI_PROCESS = "LMCacheMPConnector"
IN_PROCESS = "LMCacheConnectorV1"
VLLM = ("0.19.1", "0.22.1", "0.25.1", "0.28.0", "0.30.0", "0.32.0", "0.33.0")
LMCACHE = ("0.4.7", "0.5.2", "0.5.5", "0.5.6")


@dataclass(frozen=True)
class Use:
    """A pair of releases and what is done with it.

    Attributes:
        vllm: Release of vLLM.
        lmcache: Release of LMCache.
        connector: vLLM's name of the connector.
        hybrid: Whether some layers of the model keep a recurrent state (Mamba, GDN).
        latent: Whether its attention is latent (MLA).
    """

    vllm: str
    lmcache: str
    connector: str
    hybrid: bool = False
    latent: bool = False


@dataclass(frozen=True)
class Good:
    """Releases that are known to work together.

    Attributes:
        connector: With this connector.
        vllm: Releases of vLLM.
        lmcache: Releases of LMCache.
        evidence: How that is known.
        hybrid: Also for hybrid models.
    """

    connector: str
    vllm: str
    lmcache: str
    evidence: str
    hybrid: bool = False

    def covers(self, use: Use) -> bool:
        """Whether it speaks for this use; a development build is judged by its sources alone, elsewhere."""
        return (
            self.connector == use.connector
            and (self.hybrid or not use.hybrid)
            and in_range(use.vllm, self.vllm) is not False
            and in_range(use.lmcache, self.lmcache) is not False
        )


@dataclass(frozen=True)
class Broken:
    """Releases that are known not to.

    Attributes:
        vllm: Releases of vLLM.
        lmcache: Releases of LMCache that do not work with them.
        why: What goes wrong.
        upstream: Where it is discussed.
        connector: Only with this connector, or None for all.
        hybrid: Only for hybrid models.
        latent: False: not with latent attention.
    """

    vllm: str
    lmcache: str
    why: str
    upstream: tuple[str, ...] = ()
    connector: str | None = None
    hybrid: bool = False
    latent: bool = True

    def hits(self, use: Use) -> bool:
        """Whether this use is one of them."""
        return (
            self.connector in (None, use.connector)
            and (use.hybrid or not self.hybrid)
            and (self.latent or not use.latent)
            and in_range(use.vllm, self.vllm) is True
            and in_range(use.lmcache, self.lmcache) is True
        )


GOOD = (
    Good(
        MULTI_PROCESS, ">=0.32,<0.34", ">=0.5.6,<0.5.7", "run here on 0.32.0; imports resolve with 0.33.0", hybrid=True
    ),
)
"""A pair is good only where this project's patches hold its keys and objects: a test compares the two."""

BROKEN = (
    Broken(">=0", "<0.4.7", "LMCache before 0.4.7 is not covered"),
    Broken(
        ">=0.29",
        "<0.5.5",
        "LMCache asks for the layout by a function that vLLM no longer has, swallows the error and guesses",
        ("LMCache#4870",),
    ),
    Broken(
        "<0.20",
        ">=0.4.7",
        "the connector for the LMCache server imports names that this vLLM does not have",
        connector=MULTI_PROCESS,
    ),
    Broken(
        ">=0",
        "<0.5.5",
        "a load that failed is reported as finished, and the request is answered from whatever was in those blocks",
        ("LMCache#3388", "LMCache#4600"),
        connector=MULTI_PROCESS,
    ),
    Broken(
        ">=0.26",
        "<0.5.6",
        "the pages of hybrid models are stored in a shape that vLLM no longer uses: wrong tokens on every hit",
        ("LMCache#4247",),
        connector=MULTI_PROCESS,
        hybrid=True,
    ),
    Broken(
        "<0.22",
        ">=0",
        "the connector in this vLLM can't serve hybrid models ('failed to convert the KV cache specs' at start)",
        ("vllm#42911",),
        connector=MULTI_PROCESS,
        hybrid=True,
    ),
    Broken(
        ">=0",
        ">=0",
        "the in-process connector can't serve hybrid models ('failed to convert the KV cache specs' at start)",
        ("vllm#42911",),
        connector=IN_PROCESS,
        hybrid=True,
    ),
    Broken(
        ">=0.26",
        ">=0",
        "the in-process connector takes keys and values of vLLM's packed layout for one another",
        ("LMCache#4463", "LMCache#4614"),
        connector=IN_PROCESS,
        latent=False,
    ),
    Broken(
        ">=0.26",
        ">=0",
        "nothing proves the in-process connector exact for latent attention: it was emulated in part, never run",
        connector=IN_PROCESS,
    ),
)


def judge(use: Use) -> list[str]:
    """What is wrong with a pair: its known faults, or that it is not covered; empty where it is good."""
    faults = [broken.why for broken in BROKEN if broken.hits(use)]
    if faults or any(good.covers(use) for good in GOOD):
        return faults
    covered = "; ".join(f"{good.connector} with vLLM {good.vllm} and LMCache {good.lmcache}" for good in GOOD)
    return [f"these releases are not covered: the patches of LMCache are for {covered}"]


def nearest(use: Use) -> Use:
    """The good pair that changes least: the connector last, then vLLM, then LMCache, whose newest comes first."""
    return min(_candidates(use), key=lambda other: _distance(use, other))


def remedy(use: Use) -> str:
    """What to install instead, and which connector to use."""
    best = nearest(use)
    if best.vllm != use.vllm:
        install = f"Install vLLM {best.vllm} with LMCache {best.lmcache}."
    elif best.lmcache != use.lmcache:
        install = f"Install LMCache {best.lmcache}; vLLM {best.vllm} may stay."
    else:
        install = ""
    change = f"Use {best.connector}." if best.connector != use.connector else ""
    return " ".join(filter(None, (install, change)))


def _candidates(use: Use) -> Iterator[Use]:
    for vllm, lmcache, connector in product(
        {*VLLM, use.vllm}, {*LMCACHE, use.lmcache}, (use.connector, MULTI_PROCESS, IN_PROCESS)
    ):
        other = replace(use, vllm=vllm, lmcache=lmcache, connector=connector)
        if not judge(other):
            yield other


def _distance(use: Use, other: Use) -> tuple[bool, int, int, tuple[int, ...]]:
    newest_first = tuple(-part for part in _numbers(other.lmcache))
    steps = _steps(use.vllm, other.vllm, VLLM), _steps(use.lmcache, other.lmcache, LMCACHE)
    return (use.connector != other.connector, *steps, newest_first)


def _steps(one: str, other: str, known: tuple[str, ...]) -> int:
    """How many known releases lie between two, the second counted."""
    if one == other:
        return 0
    low, high = sorted((_numbers(one), _numbers(other)))
    return 1 + sum(low < _numbers(release) < high for release in known)


def _numbers(release: str) -> tuple[int, ...]:
    from packaging.version import Version

    return Version(release).release
