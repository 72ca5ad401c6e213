"""Installed sources beside the reviewed ones, one line a function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from patches.framework import fingerprints, review
from patches.framework.errors import TargetMissingError
from patches.framework.libraries import DISTRIBUTIONS, installed_version

__all__ = ["Line", "differences"]


@dataclass(frozen=True)
class Line:
    """One function or class: its installed fingerprint, and the releases in which the same one was reviewed."""

    name: str
    digest: str | None
    releases: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether nobody has reviewed what is installed."""
        return not self.releases

    def __str__(self) -> str:
        if self.digest is None:
            return f"missing   {self.name}"
        if self.differs:
            source = fingerprints.installed_source(self.name.partition(":")[0])
            return f"DIFFERS   {self.name} {self.digest[:12]}: {source}"
        return f"reviewed  {self.name} {self.digest[:12]} ({', '.join(self.releases)})"


def _line(name: str) -> Line:
    try:
        digest = fingerprints.take((name,))["targets"][name]
    except TargetMissingError:
        return Line(name, None, ())
    known = fingerprints.reviewed(name.partition(".")[0]).targets
    return Line(name, digest, known.get(name, {}).get(digest, ()))


def differences(names: list[str]) -> Iterator[Line]:
    """Compare ``names`` (``module:qualname``), or what the patches for the installed releases stand on."""
    for library in DISTRIBUTIONS:
        version = installed_version(library)
        if version is not None and not names:
            yield from map(_line, review.names(library, version))
    yield from map(_line, names)
