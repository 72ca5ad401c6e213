"""Taking the fingerprints of the installed sources, for a person to review and commit."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import patches
from patches.framework import fingerprints, rundir, settings
from patches.framework.errors import TargetMissingError
from patches.framework.libraries import in_range, installed_version
from patches.framework.selection import selected

__all__ = ["names", "snapshot", "write"]


def names(library: str, version: str, patch_ids: tuple[str, ...] = patches.PATCH_IDS) -> tuple[str, ...]:
    """``module:qualname`` of everything that the named patches stand on under this release."""
    found: dict[str, None] = {}
    for patch in patches.catalogue():
        needed = patch.library == library and in_range(version, patch.releases) is not False
        if needed and patch.id in patch_ids:
            found |= dict.fromkeys(patch.reviewed_names(version))
    return tuple(sorted(found))


def snapshot(library: str, patch_ids: tuple[str, ...] = patches.PATCH_IDS) -> dict[str, Any]:
    """The installed library's fingerprints under the named patches, in the form of a reviewed file.

    Raises:
        TargetMissingError: the library, a module or a name is not there.
    """
    version = installed_version(library)
    if version is None:
        raise TargetMissingError(f"{library} is not installed", f"an installed {library}", "Install it.")
    release = version.partition("+")[0]
    taken = fingerprints.take(names(library, version, patch_ids))
    return {"library": library, "release": release, "reviewed": datetime.now(timezone.utc).date().isoformat(), **taken}


def write(library: str) -> Path:
    """Write the snapshot into ``patches/reviewed`` and return the file. The reviewer reads the sources first.

    ``SPLINT_PATCHES`` picks the patches that were reviewed; what the release's file says about the others is kept,
    and the file keeps its date where nothing has changed.
    """
    picked = selected(settings.get("SPLINT_PATCHES"))
    data = snapshot(library, picked)
    path = fingerprints.REVIEWED_FOLDER / f"{library}-{data['release']}.json"
    others = names(library, data["release"], tuple(set(patches.PATCH_IDS) - set(picked)))
    earlier = rundir.read_json(path) or _NOTHING
    data = _with(data, earlier, set(others) - set(data["targets"]))
    if data == {**earlier, "reviewed": data["reviewed"]}:
        return path
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    fingerprints.reviewed.cache_clear()
    return path


_NOTHING: dict[str, Any] = {"targets": {}, "files": {}, "decorated": []}


def _with(data: dict[str, Any], earlier: dict[str, Any], others: set[str]) -> dict[str, Any]:
    """``data`` and what ``earlier`` has of the names in ``others``; of two file versions neither is known whole."""
    kept = {name: digest for name, digest in earlier["targets"].items() if name in others}
    modules = {name.partition(":")[0] for name in kept}
    files = {module: digest for module, digest in earlier["files"].items() if module in modules}
    differing = {module for module in files if data["files"].get(module, files[module]) != files[module]}
    return {
        **data,
        "targets": kept | data["targets"],
        "files": {module: digest for module, digest in (files | data["files"]).items() if module not in differing},
        "decorated": sorted({*data["decorated"], *(name for name in earlier["decorated"] if name in kept)}),
    }
