"""What the doctor knows: rules as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patches.framework.libraries import in_range

if TYPE_CHECKING:
    from collections.abc import Callable

    from entrypoint.doctor.reading import Reading

__all__ = ["HELD", "LEVELS", "NOTE", "REFUSE", "WARN", "Finding", "Rule"]

REFUSE = "refuse"
WARN = "warn"
NOTE = "note"
HELD = "held"
LEVELS = {
    REFUSE: "the server can't work, or its answers can be wrong: exit code 78",
    WARN: "it works until something happens",
    NOTE: "worth knowing",
    HELD: "a fault of this release that one of our patches holds",
}


@dataclass(frozen=True)
class Rule:
    """One hazard.

    Attributes:
        id: Short and unique.
        level: ``refuse``, ``warn`` or ``note``; see :data:`LEVELS`.
        topic: The section that it is shown in.
        what: One sentence: what is, or will be, wrong.
        why: Why that matters.
        change: What to do.
        found: What of the configuration shows it (for people), or None where it does not apply.
        upstream: Where it is discussed.
        vllm: The releases of vLLM that have it; all where it is empty.
        lmcache: The releases of LMCache that have it; all where it is empty.
        patch: The patch that holds it where that is on.
    """

    id: str
    level: str
    topic: str
    what: str
    why: str
    change: str
    found: Callable[[Reading], str | None]
    upstream: tuple[str, ...] = ()
    vllm: str = ""
    lmcache: str = ""
    patch: str | None = None

    def of_these_releases(self, reading: Reading) -> bool:
        """Whether the installed releases have the fault; a release that can't be placed counts as one that has it."""
        pairs = ((self.vllm, reading.subject.vllm), (self.lmcache, reading.subject.lmcache))
        return all(not wanted or found is None or in_range(found, wanted) is not False for wanted, found in pairs)

    def examine(self, reading: Reading) -> Finding | None:
        """The finding, or None where all is well."""
        found = self.found(reading) if self.of_these_releases(reading) else None
        if found is None:
            return None
        held = self.patch is not None and self.patch in reading.patches
        return Finding(self, HELD if held else self.level, found)


@dataclass(frozen=True)
class Finding:
    """A rule that applies; ``found`` is what of the configuration shows it."""

    rule: Rule
    level: str
    found: str

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        rule = self.rule
        return {
            "id": rule.id,
            "level": self.level,
            "topic": rule.topic,
            "found": self.found,
            "what": rule.what,
            "why": rule.why,
            "change": rule.change,
            "upstream": list(rule.upstream),
            "patch": rule.patch,
        }
