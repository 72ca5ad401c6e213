"""What carries no seals is refused, until the operator accepts it by name."""

from __future__ import annotations

from collections.abc import Iterable

from patches.framework import process, settings
from patches.framework.errors import EnvironmentRefusedError

__all__ = ["SETTING", "require_acceptance"]

SETTING = "SPLINT_LMCACHE_UNPROTECTED"


def require_acceptance(name: str, sealed: Iterable[str], what: str) -> None:
    """Refuse ``name`` unless the setting names it.

    Args:
        name: LMCache's name of a tier or serde.
        sealed: The names that need no acceptance.
        what: What it is, for the message.

    Raises:
        EnvironmentRefusedError: in enforce mode, where it is not accepted.
    """
    accepted = settings.get(SETTING)
    if name in accepted or "all" in accepted:
        return
    process.refuse(
        EnvironmentRefusedError(
            f"{what} {name} of LMCache, whose objects carry no checksum",
            f"one of {', '.join(sealed)}",
            f"Use one of these, or accept that nothing holds back damaged or foreign bytes: {SETTING}={name}",
        )
    )
