"""Taking the fingerprints of the installed sources, for a person to review and commit."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import patches
from patches.framework import fingerprints
from patches.framework.errors import TargetMissingError
from patches.framework.libraries import in_range, installed_version

__all__ = ["names", "snapshot", "write"]


def names(library: str, version: str) -> tuple[str, ...]:
    """``module:qualname`` of everything that the patches for this release stand on."""
    found: dict[str, None] = {}
    for patch in patches.catalogue():
        if patch.library == library and in_range(version, patch.releases) is not False:
            found |= dict.fromkeys(patch.reviewed_names(version))
    return tuple(sorted(found))


def snapshot(library: str) -> dict[str, Any]:
    """The installed library's fingerprints, in the form of a reviewed file.

    Raises:
        TargetMissingError: the library, a module or a name is not there.
    """
    version = installed_version(library)
    if version is None:
        raise TargetMissingError(f"{library} is not installed", f"an installed {library}", "Install it.")
    release = version.partition("+")[0]
    taken = fingerprints.take(names(library, version))
    return {"library": library, "release": release, "reviewed": datetime.now(timezone.utc).date().isoformat(), **taken}


def write(library: str) -> Path:
    """Write the snapshot into ``patches/reviewed`` and return the file. The reviewer reads the sources first."""
    data = snapshot(library)
    path = fingerprints.REVIEWED_FOLDER / f"{library}-{data['release']}.json"
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    fingerprints.reviewed.cache_clear()
    return path
