"""What carries no seals is refused, until the operator accepts it by name."""

from __future__ import annotations

from collections.abc import Iterable

from patches.framework import process, settings, values
from patches.framework.errors import EnvironmentRefusedError

__all__ = ["SETTING", "is_accepted", "require_acceptance"]

SETTING = "SPLINT_LMCACHE_UNPROTECTED"


def is_accepted(name: str) -> bool:
    """Whether the operator takes ``name`` without checksums."""
    accepted = settings.get(SETTING)
    return _word(name) in accepted or "all" in accepted


def _word(name: str) -> str:
    """What the setting calls it: tiers that LMCache has not of its own are plugins."""
    return name if name in values.UNPROTECTED else "plugin"


def require_acceptance(name: str, sealed: Iterable[str], what: str) -> None:
    """Refuse ``name`` unless the setting names it.

    Args:
        name: LMCache's name of a tier or serde.
        sealed: The names that need no acceptance.
        what: What it is, for the message.

    Raises:
        EnvironmentRefusedError: in enforce mode, where it is not accepted.
    """
    if is_accepted(name):
        return
    process.refuse(
        EnvironmentRefusedError(
            f"{what} {name} of LMCache, whose objects carry no checksum",
            f"one of {', '.join(sealed)}",
            f"Use one of these, or accept that nothing holds back damaged or foreign bytes: {SETTING}={_word(name)}",
        )
    )
