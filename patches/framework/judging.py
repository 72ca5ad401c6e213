"""Which release an installed library is judged as: by its version, or by its sources where nobody knows the version.

A rebuilt, forked or nightly library may call itself anything. Where its version is none of the reviewed releases, it is
judged as the newest one whose every reviewed function it has unchanged. Where there is none its version stands, and the
patches that do not fit say which function differs.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

from patches.framework import fingerprints, rundir
from patches.framework.errors import TargetMissingError
from patches.framework.libraries import installed_version

__all__ = ["release_of"]


def release_of(library: str) -> str | None:
    """The release that decides which patches the installed ``library`` needs; None where it is not installed."""
    version = installed_version(library)
    return None if version is None else _judged(library, version)


@cache
def _judged(library: str, version: str) -> str:
    known = _reviewed(library)
    if _public(version) in known:
        return version
    return next((release for release in _newest_first(known) if _is(library, release, known[release])), version)


def _reviewed(library: str) -> dict[str, dict[str, Any]]:
    """The reviewed files by release."""
    files = map(rundir.read_json, fingerprints.REVIEWED_FOLDER.glob(f"{library}-*.json"))
    return {data["release"]: data for data in files if data}


def _public(version: str) -> str:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).public
    except InvalidVersion:
        return version


def _newest_first(releases: Any) -> list[str]:
    from packaging.version import Version

    return sorted(releases, key=Version, reverse=True)


def _is(library: str, release: str, known: dict[str, Any]) -> bool:
    """Whether the installed sources are those of ``release``, in everything that its patches stand on.

    A release in which not every patch was reviewed is none to be taken for: less would be compared than is needed.
    """
    from patches.framework import review

    names = review.names(library, release)
    if not names or not known["targets"].keys() >= set(names):
        return False
    try:
        modules = {name.partition(":")[0] for name in names}
        same = {module for module in modules if known["files"].get(module) == _file(module)}
        taken = fingerprints.take(tuple(name for name in names if name.partition(":")[0] not in same))["targets"]
    except TargetMissingError:
        return False
    return all(known["targets"][name] == digest for name, digest in taken.items())


def _file(module: str) -> str:
    return hashlib.sha256(fingerprints.installed_source(module).read_bytes()).hexdigest()
