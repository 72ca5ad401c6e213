"""The patches of this process, seen and taken back. For probes that run in a release's own interpreter."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["calls", "patch_states", "place_of", "take_back"]


def _application() -> Any:
    from patches.framework import process

    return process.start().application


def place_of(target: Any) -> tuple[Any, str]:
    """The object that holds what a patch's target names, and its attribute there."""
    owner: Any = import_module(target.module)
    *path, name = target.qualname.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def patch_states() -> dict[str, list[str]]:
    """State and reason of every patch."""
    return {name: [found.state.value, found.reason] for name, found in _application().states.items()}


def calls() -> dict[str, int]:
    """Calls so far by seam name."""
    return dict(_application().counters.values())


def take_back() -> None:
    """Put every original back: what runs from now on is stock."""
    for found in _application().states.values():
        found.undo()
