"""``splint image verify``: every patch for the installed base fits, starts with every process, and moved nothing."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from entrypoint.image.distributions import Changes, changes, installed, listed
from entrypoint.tables import PatchRow, patch_rows
from patches import PATCH_IDS, bootstrap
from patches.framework.errors import SplintError
from patches.framework.judging import release_of
from patches.framework.libraries import DISTRIBUTIONS, installed_version
from patches.framework.reach import PLUGIN

__all__ = ["verify"]

_COLUMN = max(map(len, PATCH_IDS))
_FIT = ("ready", "ready if needed", "retired", "too old")


def verify(before: Path | None = None) -> Iterator[str]:
    """Verify this environment, one line for people after each step.

    Args:
        before: What ``pip list --format=freeze`` said before anything was installed over the base, or None.

    Raises:
        SplintError: a library is missing, a patch does not fit, the start-up hooks did not run or something moved.
    """
    yield f"Python {platform.python_version()}: {', '.join(map(_library, DISTRIBUTIONS))}"
    _check_start()
    yield "start-up hooks and plugin: in place"
    rows = patch_rows()
    yield from map(_line, rows)
    _check_fit(rows)
    if before is not None:
        found = changes(listed(before), installed())
        _check_unmoved(found)
        yield f"nothing of the base moved; added: {_versions(found.added) or 'nothing'}"
    yield f"verified: {len(rows)} patches, {sum(row.state in _FIT[:2] for row in rows)} of them for this base"


def _library(library: str) -> str:
    version, release = installed_version(library), release_of(library)
    if version is None:
        raise SplintError(f"no {library}", f"{library} in this image", f"Install {library} before it is verified.")
    return f"{library} {version}" + ("" if release == version else f", by its sources {release}")


def _check_start() -> None:
    if not bootstrap.started():
        raise SplintError(
            "the start-up hooks did not run in this process",
            "the line of vllm_splint.pth at interpreter start",
            "Install vllm-splint into the environment of this python3, and unset SPLINT_MODE.",
        )
    if not any(point.name == PLUGIN for point in entry_points(group="vllm.general_plugins")):
        raise SplintError(
            f"no plugin {PLUGIN} among vLLM's", "its entry point", "Install vllm-splint's wheel, not its files."
        )


def _line(row: PatchRow) -> str:
    names = row.patch.reviewed_names(release_of(row.patch.library))
    said = f"{len(set(names))} functions as reviewed" if row.state.startswith("ready") else row.reason
    return f"  {row.patch.id:<{_COLUMN}}  {row.state:<17}{said}"


def _check_fit(rows: list[PatchRow]) -> None:
    unfit = [row for row in rows if row.state not in _FIT]
    if unfit:
        raise SplintError(
            f"{len(unfit)} of {len(rows)} patches do not fit this base: "
            + "; ".join(f"{row.patch.id} is {row.state}: {row.reason}" for row in unfit),
            "every patch for it on reviewed sources",
            "Build on a base that vllm-splint covers, or review its sources (docs/reviewing.md).",
        )


def _check_unmoved(found: Changes) -> None:
    if found.moved:
        moved = ", ".join(f"{name} {then} is now {now or 'gone'}" for name, (then, now) in sorted(found.moved.items()))
        raise SplintError(
            moved,
            "every distribution of the base as it was",
            "Install with --no-deps, or with the base as constraints.",
        )


def _versions(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
