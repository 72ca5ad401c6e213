"""The run directory: where the processes of one server leave word for each other.

Layout, all files written whole (temporary name, then rename; they need not survive the machine, so no fsync)::

    roster/<pid>.json      one attestation a process
    roster/<pid>.calls     its call counters, one unsigned 64-bit integer a seam, live
    roster/<pid>.tally     what it counted of the external cache (hits, misses, stores), likewise
    refused/<pid>.json     why a process refused to serve
    phase.json             {"phase": ..., "since": ..., "drain_s": ..., "history": ...}, by the first API server
    canary.json            {"reason": null or why it failed, "at": ..., "seconds": ...}, by the first API server
    headless               this node has no API server, which would tell a phase: its head's gate is the one that counts
    lost.json              {"what": ...}: a part of the server on another node is gone, by an API server
    smoke.json             what the smoke tests are to prove; holds the secret, removed with the verdict
    smoke-so-far.json      the checks that have ended, while the others run
    verdict.json           what they found
    holds-<pid>            an API server besides the first holds its requests until all open together
    supervisor.json        the supervising parent: pid, start in clock ticks after boot, whether a gate tells the phases

Standard library only: it is imported at interpreter start.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from patches.framework.errors import RunDirectoryError

__all__ = [
    "CANARY",
    "ENV",
    "HEADLESS",
    "HOLDS",
    "LOST",
    "PHASE",
    "PREFIX",
    "REFUSED",
    "ROSTER",
    "SMOKE_PLAN",
    "SMOKE_SO_FAR",
    "VERDICT",
    "bases",
    "create",
    "current",
    "forget_opening",
    "read_json",
    "write_json",
]

ENV = "SPLINT_RUN_DIR"
ROSTER = "roster"
REFUSED = "refused"
PHASE = "phase.json"
LOST = "lost.json"
CANARY = "canary.json"
SMOKE_PLAN = "smoke.json"
SMOKE_SO_FAR = "smoke-so-far.json"
VERDICT = "verdict.json"
HOLDS = "holds-"
HEADLESS = "headless"
PREFIX = "splint-"


_FALLBACKS = ("/tmp", "/dev/shm")  # noqa: S108 - the folder made in there is private


def bases() -> list[Path]:
    """Where a private folder may be made, best first; a read-only root leaves at least ``/dev/shm``."""
    named = [os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR")]
    return [Path(base) for base in (*named, *_FALLBACKS) if base]


def create() -> Path:
    """Make a private folder (mode 0700) for one server and return its path.

    Raises:
        RunDirectoryError: no place for it is writable.
    """
    for base in bases():
        try:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        except OSError:
            continue
        return prepare(path)
    tried = ", ".join(str(base) for base in bases())
    raise RunDirectoryError(
        f"no writable place for the run directory (tried {tried})",
        "one private writable folder",
        f"Mount a tmpfs at /tmp or set {ENV} to a writable folder.",
    )


def prepare(path: Path) -> Path:
    """Make the folders inside ``path`` and return it. Raises RunDirectoryError: they can't be made."""
    try:
        for name in (ROSTER, REFUSED):
            (path / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory {path} can't be used ({error.strerror})",
            "a writable folder",
            f"Set {ENV} to another folder, or unset it for a private one.",
        ) from error
    return path


def forget_opening(path: Path) -> None:
    """Take away what an earlier server said of its opening: phase, verdict, and who held requests for it."""
    for left in (path / PHASE, path / VERDICT, path / HEADLESS, *path.glob(f"{HOLDS}*")):
        left.unlink(missing_ok=True)


def current() -> Path | None:
    """The run directory of the server that this process belongs to, or None outside one."""
    value = os.environ.get(ENV)
    return Path(value) if value else None


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` so that a reader sees the old file or the whole new one."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(data, file)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any | None:
    """The file's content, or None where there is no such file (yet)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
