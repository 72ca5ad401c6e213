"""``splint health``: whether the server of this machine or container is open, from the files of its run directory.

No connection is made, so it works with any port, ``--uds``, TLS, an API key and headless nodes.
Standard library only: an orchestrator calls it every few seconds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patches.framework import rundir
from patches.supervision import living
from patches.supervision.members import ENGINES, WATCHED, read_object, read_refusals

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Health", "health", "main"]

USAGE = """Usage: splint health

Says whether the vLLM server of this machine or container is open for traffic; exit code 0 if so, else 1. Reads the run
directory (SPLINT_RUN_DIR, or the private folder of this user's newest living server) and connects to nothing.
A headless node is healthy when its engines have attested their patches and have their KV caches.
With SPLINT_MODE=off, where there is no run directory, the server's own /health is asked.
"""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Health:
    """The answer and one line that explains it."""

    healthy: bool
    reason: str

    def __str__(self) -> str:
        return f"{'healthy' if self.healthy else 'unhealthy'}: {self.reason}"


def _folder() -> Path | None:
    named = rundir.current()
    folders = [named] if named is not None else living.private_folders()
    return next(filter(living.is_living, folders), None)


def _where() -> str:
    named = os.environ.get(rundir.ENV)
    return f"{rundir.ENV}={named}" if named else ", ".join(dict.fromkeys(map(str, rundir.bases())))


def health(folder: Path) -> Health:
    """The health of the living server whose run directory is ``folder``. Linear in its processes."""
    members = [entry for entry in living.attested(folder) if entry.get("role") in WATCHED]
    problem = _refusal(folder) or _loss(members) or _told(folder) or _phase(folder, members)
    if problem:
        return Health(False, problem)
    phase = read_object(folder / rundir.PHASE).get("phase", "engines up")
    return Health(True, f"{phase}, {len(members)} processes alive")


def _refusal(folder: Path) -> str | None:
    refusals = read_refusals(folder)
    return f"refused to serve: {refusals[0].found}" if refusals else None


def _loss(members: Sequence[Entry]) -> str | None:
    return next((f"{_name(entry)} has ended" for entry in members if not entry["alive"]), None)


def _told(folder: Path) -> str | None:
    """What an API server found wrong after the opening: a rank of another node lost, or a canary without an answer."""
    what = read_object(folder / rundir.LOST).get("what") or read_object(folder / rundir.CANARY).get("reason")
    return str(what) if what else None


def _phase(folder: Path, members: Sequence[Entry]) -> str | None:
    """What keeps the gate shut or, on a node without one, what its engines still lack."""
    if read_object(folder / living.SUPERVISOR).get("gated", True):
        phase = read_object(folder / rundir.PHASE).get("phase", "loading")
        return None if phase == "serving" else f"phase {phase}"
    engines = [entry for entry in members if entry.get("role") in ENGINES]
    lacking = (problem for entry in engines if (problem := _lacking(entry)))
    return next(lacking, None) if engines else "no engine has attested yet"


def _lacking(entry: Entry) -> str | None:
    """What an engine core or worker lacks before it can serve; None where nothing."""
    states = {patch.get("id"): patch.get("state") for patch in entry.get("patches", [])}
    if "refused" in states.values():
        refused = ", ".join(name for name, state in states.items() if state == "refused")
        return f"{_name(entry)}: refused patches: {refused}" if entry.get("mode") == "enforce" else None
    if not entry.get("plugin_verified"):
        return f"{_name(entry)} is not verified yet"
    budgeted = entry.get("role") == "engine_core" and states.get("kv_budget") == "applied"
    if budgeted and "kv_budget" not in entry.get("facts", {}):
        return f"{_name(entry)} has no KV cache yet"
    return None


def _name(entry: Entry) -> str:
    ranks = (("DP", entry.get("dp_rank")), ("rank ", entry.get("rank")))
    return " ".join([str(entry.get("role")), *(f"{label}{rank}" for label, rank in ranks if rank is not None)])


def _stock() -> Health:
    """The health of the server that ``SPLINT_MODE=off`` leaves as it is."""
    from entrypoint import stock

    words = stock.newest_server()
    return Health(*stock.answer(words)) if words else Health(False, "no vLLM server of this user runs here")


def _proven() -> Health:
    folder = _folder()
    return health(folder) if folder else Health(False, f"no server of this user runs here (looked in {_where()})")


def main(words: Sequence[str]) -> int:
    """Print one line; return 0 where the server is open, 1 where it is not, 2 for wrong usage."""
    if words:
        print(USAGE, end="")
        return 0 if list(words) in (["--help"], ["-h"]) else 2
    found = _stock() if os.environ.get("SPLINT_MODE") == "off" else _proven()
    print(found)
    return 0 if found.healthy else 1
