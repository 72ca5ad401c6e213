"""Which patches ``SPLINT_PATCHES`` picks. Standard library only."""

from __future__ import annotations

import patches
from patches.framework import settings
from patches.framework.errors import SettingError

__all__ = ["check_settings", "selected"]


def selected(
    names: tuple[str, ...], known: tuple[str, ...] = patches.PATCH_IDS, setting: str = "SPLINT_PATCHES"
) -> tuple[str, ...]:
    """Those of ``known`` that ``names`` pick: ``all``, ``none``, some, or all but some (each with a leading ``-``).

    Raises:
        SettingError: a name is unknown, or names to keep and names to drop are mixed.
    """
    if names in (("all",), ("on",)):
        return known
    if names in (("none",), ("off",)):
        return ()
    dropped = tuple(name[1:] for name in names if name.startswith("-"))
    kept = tuple(name for name in names if not name.startswith("-"))
    unknown = sorted({*dropped, *kept} - set(known))
    if unknown or (dropped and kept):
        found = f"{setting} names {', '.join(unknown)}" if unknown else f"{setting} mixes names and -names"
        raise SettingError(found, f"all, none, or some of {', '.join(known)} (or each with a leading -)", "Correct it.")
    return kept or tuple(name for name in known if name not in dropped)


def check_settings() -> None:
    """Check every ``SPLINT_*`` variable of this process, the names in ``SPLINT_PATCHES`` included.

    Raises:
        SettingError: one is unknown or malformed.
    """
    settings.check_environment()
    selected(settings.get("SPLINT_PATCHES"))
