"""What is said about the patches, generated from their records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from patches import catalogue
from patches.framework import fingerprints
from patches.framework.errors import RefusedError
from patches.framework.judging import release_of
from patches.framework.libraries import in_range, is_before
from patches.framework.selection import selected
from patches.framework.settings import get

if TYPE_CHECKING:
    from patches.framework.records import Patch

__all__ = ["PatchRow", "patch_rows", "render"]


@dataclass(frozen=True)
class PatchRow:
    """One patch as tables show it; ``state`` is for the release that is installed here, ``reason`` explains it.

    States: ``ready`` (its sources are the reviewed ones), ``ready if needed`` (the same, and the machine decides when
    a server starts), ``retired`` (the release does not need it), ``too old`` (the release is older than those that it
    is for, and what it holds there is not held), ``off``, ``no library`` and ``refused``.
    """

    patch: Patch
    state: str
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The row for ``--json``."""
        patch = self.patch
        return {
            "id": patch.id,
            "purpose": patch.purpose,
            "fault": patch.fault,
            "library": patch.library,
            "releases": patch.releases,
            "roles": sorted(role.value for role in patch.roles),
            "targets": [target.name for target in patch.targets_for(release_of(patch.library))],
            "upstream": list(patch.upstream),
            "retires": patch.retires,
            "exercised_by": patch.exercised_by,
            "state": self.state,
            "reason": self.reason,
        }


def _row(patch: Patch, *, on: bool) -> PatchRow:
    version = release_of(patch.library)
    if not on:
        return PatchRow(patch, "off", "left out by SPLINT_PATCHES")
    if version is None:
        return PatchRow(patch, "no library", f"{patch.library} is not installed")
    if in_range(version, patch.releases) is False:
        state = "too old" if is_before(version, patch.releases) else "retired"
        return PatchRow(patch, state, f"{patch.library} {version} is outside {patch.releases}")
    try:
        fingerprints.check(patch.reviewed_names(version))
    except RefusedError as error:
        return PatchRow(patch, "refused", str(error))
    return PatchRow(patch, "ready if needed" if patch.condition else "ready")


def patch_rows() -> list[PatchRow]:
    """Every patch in catalogue order, with its state on the installed releases. Imports neither of them.

    Raises:
        SettingError: ``SPLINT_PATCHES`` is malformed.
    """
    chosen = selected(get("SPLINT_PATCHES"))
    return [_row(patch, on=patch.id in chosen) for patch in catalogue()]


_STYLES = {"ready": "green", "ready if needed": "green", "refused": "red"}


def _block(row: PatchRow) -> RenderableType:
    patch = row.patch
    head = Text.assemble(
        (patch.id, "bold"), "  ", (row.state, _STYLES.get(row.state, "yellow")), f"  {patch.library} {patch.releases}"
    )
    lines = [
        row.reason,
        patch.purpose,
        f"in: {', '.join(sorted(role.value for role in patch.roles))}",
        f"upstream: {', '.join(patch.upstream)}" if patch.upstream else "",
        f"retires: {patch.retires}",
    ]
    return Group(head, Padding("\n".join(filter(None, lines)), (0, 0, 1, 4)))


def render(rows: list[PatchRow]) -> RenderableType:
    """One block a patch, so that it reads in a terminal of any width."""
    return Group(*map(_block, rows))
