"""A patch as data: what it mends, where, for which releases, and what ends its life.

Nothing in here imports vLLM, LMCache or torch: records are read in processes that have none of them loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Exercise", "Feature", "Patch", "Role", "Seam", "Target"]


class Role(str, Enum):
    """What a process does in a serving deployment."""

    API_SERVER = "api_server"
    LAUNCHER = "launcher"
    DP_COORDINATOR = "dp_coordinator"
    ENGINE_CORE = "engine_core"
    WORKER = "worker"
    LMCACHE_SERVER = "lmcache_server"


class Feature(str, Enum):
    """What a server has or has not, as far as it decides which seams its smoke tests must have called.

    PROBED: engines answer the control calls of the smoke tests. LMCACHE: ``LMCacheMPConnector`` stores and loads.
    EXPERT_RANKS: data-parallel ranks with the experts of one model spread over them. ENGINE_DRIVEN, LMCACHE_DRIVEN:
    workers, or the LMCache server, copy between the two. COMMAND: started by a command of vLLM's, which parses its
    arguments. ONE_API_SERVER: and by the API server itself, because there is no other. PROFILED: GPU workers, which
    run the model once before they plan a KV cache. MEASURED: and size it by the memory that the run leaves.
    """

    PROBED = "probed"
    LMCACHE = "lmcache"
    EXPERT_RANKS = "expert_ranks"
    ENGINE_DRIVEN = "engine_driven"
    LMCACHE_DRIVEN = "lmcache_driven"
    COMMAND = "command"
    ONE_API_SERVER = "one_api_server"
    PROFILED = "profiled"
    MEASURED = "measured"


@dataclass(frozen=True)
class Exercise:
    """Seams that every process of a role must have called when the smoke tests have passed.

    Attributes:
        role: Of the processes.
        seams: Qualified names among the patch's targets; one of them called is enough.
        where: What the server must have for it; empty for every server.
    """

    role: Role
    seams: tuple[str, ...]
    where: frozenset[Feature] = frozenset()


class Seam:
    """What a wrapper factory is given: the object it stands in for, and its call counter.

    ``original`` is None where the patch defines an attribute that the release lacks.
    """

    __slots__ = ("_count", "name", "original")

    def __init__(self, name: str, original: Any, count: Callable[[], None]) -> None:
        self.name = name
        self.original = original
        self._count = count

    def count(self) -> None:
        """Record one call. Costs about 0.1 µs: one store into memory that the roster reads."""
        self._count()


@dataclass(frozen=True)
class Target:
    """One attribute that a patch replaces or defines.

    Attributes:
        module: Import path of the module that defines the attribute.
        qualname: Dotted name inside the module, ``function`` or ``Class.method``.
        wrapper: ``module:factory``; the factory takes a :class:`Seam` and returns the replacement.
        reviewed: Qualified names in the same module whose source the reviewer read. Empty: the attribute itself.
        defines: True where the release lacks the attribute and the patch adds it.
        releases: PEP 440 specifier of the releases, within the patch's own, that have this attribute in this place.
            Empty: all of them.
    """

    module: str
    qualname: str
    wrapper: str
    reviewed: tuple[str, ...] = ()
    defines: bool = False
    releases: str = ""

    @property
    def name(self) -> str:
        """``module:qualname``, the target's key in reports and in the reviewed files."""
        return f"{self.module}:{self.qualname}"

    @property
    def reviewed_names(self) -> tuple[str, ...]:
        """The ``module:qualname`` keys that must match a reviewed fingerprint."""
        return tuple(f"{self.module}:{name}" for name in self.reviewed or (self.qualname,))


@dataclass(frozen=True)
class Patch:
    """One fault of one library, and the wrappers that hold it until upstream has healed.

    Attributes:
        id: Short, unique, the name of its folder.
        purpose: One sentence for tables and reports.
        fault: What stock does, and to whom.
        library: Import name of the patched library, ``vllm`` or ``lmcache``.
        releases: PEP 440 specifier of the releases that need the patch. Outside it the patch is inert.
        targets: Everything it replaces. Applied whole or not at all.
        roles: Processes that must carry it once their target modules are imported.
        upstream: Issues and pull requests, ``vllm#57270``; empty where no report is known.
        retires: What ends the patch's life.
        exercised_by: Which smoke check or event moves its call counters, for people.
        exercises: The same for the smoke tests.
        unexercised: Why neither a start nor the smoke tests bring about the calls of those ``roles`` that
            ``exercises`` leaves out; empty where it leaves out none.
        condition: ``module:function`` that returns None where the patch is needed on this machine,
            else the reason why not. Empty: needed everywhere.
    """

    id: str
    purpose: str
    fault: str
    library: str
    releases: str
    targets: tuple[Target, ...]
    roles: frozenset[Role]
    retires: str
    exercised_by: str
    upstream: tuple[str, ...] = field(default=())
    exercises: tuple[Exercise, ...] = ()
    unexercised: str = ""
    condition: str = ""

    def targets_for(self, version: str | None) -> tuple[Target, ...]:
        """The targets that the library's release ``version`` has; all of them where it is not known."""
        from patches.framework.libraries import in_range

        return tuple(
            target
            for target in self.targets
            if not target.releases or version is None or in_range(version, target.releases) is not False
        )

    def reviewed_names(self, version: str | None) -> tuple[str, ...]:
        """The ``module:qualname`` keys whose source must be a reviewed one under release ``version``."""
        return tuple(name for target in self.targets_for(version) for name in target.reviewed_names)
