"""How an LMCache server says over its own protocol who it is, and what an engine makes of it.

Engines ask every server for the names of its experimental transfers. A patched one has one name more: its attestation.
A stock server answers the question without it, and a stock engine takes the name for a transfer that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import patches
from patches.framework import roster, tallies
from patches.framework.application import State
from patches.framework.records import Role
from patches.framework.selection import selected

__all__ = ["SAID_ANEW_AFTER_S", "STOCK", "fault", "in_answer", "word"]

SAID_ANEW_AFTER_S = 1.0
"""Seconds for which a server gives all engines the same attestation."""

STOCK = "no vllm-splint"
_PREFIX = "vllm-splint "
_SOUND = {State.APPLIED.value, State.PENDING.value, State.NOT_APPLICABLE.value}
_FORM: dict[str, type | tuple[type, ...]] = {
    "role": str,
    "pid": int,
    "start_time": (int, type(None)),
    "host": str,
    "splint": str,
    "mode": str,
    "patch_set": str,
    "libraries": dict,
    "facts": dict,
    "patches": list,
    "missed": list,
    "calls": dict,
    "tallies": dict,
    "timings_ms": dict,
}
"""What an attestation must have to be read; the rest is left as it comes."""


def word(attestation: Mapping[str, Any], calls: Mapping[str, int], tallied: Mapping[str, int]) -> str:
    """What a patched server adds to its answer: itself, without the patches that are for other processes."""
    said = {
        **attestation,
        "patches": [each for each in attestation["patches"] if each["id"] in _of_the_server()],
        "calls": {seam: count for seam, count in calls.items() if count},
        "tallies": dict(tallied),
    }
    return _PREFIX + json.dumps({name: said[name] for name in ("schema", *_FORM, "dp_rank", "rank", "plugin_verified")})


def in_answer(names: Iterable[str]) -> dict[str, Any] | None:
    """The attestation among the names that a server answered.

    Returns:
        None: there is none. Empty: there is one in a form that this release can't read.
    """
    text = next((name for name in names if name.startswith(_PREFIX)), None)
    if text is None:
        return None
    try:
        said = json.loads(text.removeprefix(_PREFIX))
    except ValueError:
        return {}
    if not (isinstance(said, dict) and said.get("schema") == roster.SCHEMA and _formed(said)):
        return {}
    return {**said, "tallies": {cell: count for cell, count in said["tallies"].items() if tallies.is_cell(cell)}}


def _formed(said: Mapping[str, Any]) -> bool:
    if not all(isinstance(said.get(name), kind) for name, kind in _FORM.items()):
        return False
    counts = [*said["calls"].values(), *said["tallies"].values()]
    rows = said["patches"]
    return (
        said["role"] == Role.LMCACHE_SERVER.value
        and all(isinstance(count, int) for count in counts)
        and all(isinstance(row, dict) and {"id", "state", "reason"} <= row.keys() for row in rows)
    )


def fault(server: Mapping[str, Any] | None, selection: tuple[str, ...]) -> str | None:
    """Why a server does not protect what an engine stores in it, in words that follow "has"; None where it does.

    Args:
        server: As :func:`in_answer` found it.
        selection: The engine's own choice of patches; what it has left out is not asked of the server either.
    """
    if server is None:
        return STOCK
    if not server:
        return "a vllm-splint that describes itself in a form which this release can't read"
    if server["mode"] != "enforce":
        return f"vllm-splint {server['splint']} in SPLINT_MODE={server['mode']}, where patches are not required"
    states = {each["id"]: each["state"] for each in server["patches"]}
    bare = [
        f"{name} ({states.get(name, 'unknown there')})"
        for name in selected(selection)
        if name in _of_the_server() and states.get(name) not in _SOUND
    ]
    bare += [f"{target} (bare)" for target in server["missed"]]
    return f"vllm-splint {server['splint']} without {', '.join(bare)}" if bare else None


@cache
def _of_the_server() -> frozenset[str]:
    return frozenset(patch.id for patch in patches.catalogue() if Role.LMCACHE_SERVER in patch.roles)
