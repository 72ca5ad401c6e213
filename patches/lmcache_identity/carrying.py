"""How a profile gets from where it is derived to where keys are made: on vLLM's own objects, through their pickling."""

from __future__ import annotations

from typing import Any

from patches.framework import process
from patches.framework.application import State
from patches.framework.errors import EnvironmentRefusedError, ProfileError
from patches.framework.judging import release_of
from patches.framework.libraries import in_range
from patches.lmcache_identity.profile import KVCacheProfile

__all__ = ["attach", "carried", "missing", "publish", "published", "require_identity", "uses_lmcache"]

_ATTRIBUTE = "splint_kv_profile"
_IDENTITY = "lmcache_identity"
_published: KVCacheProfile | None = None


def uses_lmcache(config: Any) -> bool:
    """Whether the engine's connector, or one inside a connector of several, is LMCache's.

    Args:
        config: vLLM's ``VllmConfig``.
    """
    return "lmcache" in repr(config.kv_transfer_config).lower()


def require_identity(config: Any) -> None:
    """Refuse an engine with LMCache whose release the patches of its keys are not for: its keys would be bare.

    An operator who leaves the patch out with ``SPLINT_PATCHES`` has said so, and the report shows it.

    Raises:
        EnvironmentRefusedError: in enforce mode.
    """
    current = process.current()
    if current is None or not uses_lmcache(config):
        return
    state, release = current.application.states[_IDENTITY], release_of("lmcache")
    if state.state is State.OFF or in_range(release or "unknown", state.patch.releases) is not False:
        return
    process.refuse(
        EnvironmentRefusedError(
            f"LMCache {release}, whose keys do not say which KV cache they stand for",
            f"LMCache {state.patch.releases}, where {_IDENTITY} sees to it",
            "Install LMCache 0.5.6, serve without it, or accept what stock does: SPLINT_PATCHES=-lmcache_identity",
        )
    )


def attach(owner: Any, profile: KVCacheProfile) -> None:
    """Let ``owner``, a configuration of vLLM's, carry the profile, to wherever it is copied or sent."""
    vars(owner)[_ATTRIBUTE] = profile


def carried(owner: Any) -> KVCacheProfile | None:
    """The profile that ``owner`` carries."""
    return None if owner is None else vars(owner).get(_ATTRIBUTE)


def publish(profile: KVCacheProfile) -> None:
    """Make it this process's profile, and show it in the report.

    Raises:
        ProfileError: it has no fingerprint.
    """
    global _published
    _published = profile
    if (current := process.current()) is not None:
        current.note(kv_profile=profile.describe())


def published() -> KVCacheProfile | None:
    """This process's profile: None in a process that serves no model, such as LMCache's own servers."""
    return _published


def missing(where: str) -> ProfileError:
    """The error of a place that needs the profile and was given none."""
    return ProfileError(
        f"no KV profile reached {where}",
        "the one that the engine core derives before it starts its workers",
        "Do not leave out kv_profile alone: leave out lmcache_identity too, or neither, with SPLINT_PATCHES.",
    )
