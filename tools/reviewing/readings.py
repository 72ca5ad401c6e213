"""The functions that patches stand on, release by release, each with what was read of it before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff

from support import releases

from patches.framework import fingerprints
from patches.framework.libraries import in_range
from patches.framework.records import Patch

__all__ = ["Reading", "Shelf", "covered", "readings"]

# Runs with the release's sources in front; nothing of them is imported.
WRITE = """
import json
from patches.framework import fingerprints, review, settings
picked = settings.get("SPLINT_PATCHES")
path = review.write("vllm")
release = json.loads(path.read_text())["release"]
found = {}
for name in review.names("vllm", release, picked):
    source = fingerprints.source(name)
    place = f"{fingerprints.installed_source(name.partition(':')[0])}:{source.line}"
    found[name] = {"digest": fingerprints.source_digest(source.text), "text": source.text, "place": place}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Reading:
    """One function of one release, and where its text was reviewed before.

    Attributes:
        text: Its source.
        place: File and first line.
        like: A release with the same text, or empty.
        before: The text in the release before, within this run.
    """

    release: str
    name: str
    text: str
    place: str
    like: str
    before: str = ""

    def __str__(self) -> str:
        return f"{self.release:8} {f'as in {self.like}' if self.like else 'TO READ':14} {self.name}  {self.place}"

    def diff(self) -> str:
        """How it differs from the release before; the whole text where there is none."""
        lines = unified_diff(self.before.splitlines(), self.text.splitlines(), "before", self.release, lineterm="")
        return "\n".join(lines)


def covered(patch: Patch) -> tuple[str, ...]:
    """The releases in ``requirements/releases.lock`` that ``patch`` is for, oldest first."""
    return tuple(release for release in releases.every() if in_range(release, patch.releases))


def readings(records: Sequence[Patch], wanted: Sequence[str] = ()) -> Iterator[Reading]:
    """Write the reviewed file of each release that the patches cover, or of those wanted; tell what is in it."""
    shelf = Shelf()
    for release in releases.every():
        ids = [patch.id for patch in records if release in covered(patch)]
        if ids and (not wanted or release in wanted):
            for name, found in _write(release, ids).items():
                yield shelf.add(release, name, found)


class Shelf:
    """Everything that was read so far: the releases by name and digest, and the last text by name."""

    def __init__(self) -> None:
        self._known = {name: dict(found) for name, found in fingerprints.reviewed("vllm").targets.items()}
        self._texts: dict[str, str] = {}

    def add(self, release: str, name: str, found: dict[str, str]) -> Reading:
        """Put one function of a release on it."""
        digests = self._known.setdefault(name, {})
        like = digests.get(found["digest"], ())
        reading = Reading(
            release, name, found["text"], found["place"], like[0] if like else "", self._texts.get(name, "")
        )
        digests[found["digest"]] = (*like, release)
        self._texts[name] = found["text"]
        return reading


def _write(release: str, ids: Sequence[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = releases.value(release, WRITE, patches=",".join(ids), SPLINT_MODE="off")
    return found
