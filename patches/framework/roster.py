"""Attestations: what each process of a server says about itself, and what the gate makes of them.

A process writes ``roster/<pid>.json`` when it learns its role, whenever a patch changes state, and when the plugin has
verified it. Its call counters lie beside it and move while it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import patches
from patches.framework import counters, rundir, tallies
from patches.framework.application import State
from patches.framework.records import Role
from patches.supervision.processes import read_state

__all__ = [
    "REMOTE",
    "SCHEMA",
    "compare",
    "everywhere",
    "load",
    "name",
    "name_of",
    "patch_set_digest",
    "remote",
    "start_time",
]

SCHEMA = 1
REMOTE = "lmcache_servers"
"""The fact in which an engine core keeps what LMCache servers elsewhere say of themselves, by address."""
_VERIFIED_ROLES = frozenset({Role.API_SERVER, Role.ENGINE_CORE, Role.WORKER})


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which process ``pid`` started, or None where there is no such process."""
    state = read_state(pid)
    return None if state is None or state.ended else state.started


@cache
def patch_set_digest(selection: tuple[str, ...]) -> str:
    """Identity of the patches' code, the reviewed fingerprints and the selection, 16 hex digits."""
    digest = hashlib.sha256(repr((patches.__version__, selection)).encode())
    root = Path(patches.__file__).parent
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.json")]):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def load(run_dir: Path) -> list[dict[str, Any]]:
    """Every attestation in ``run_dir``, with ``calls`` by seam and ``alive`` added. Linear in processes."""
    found = []
    for path in sorted((run_dir / rundir.ROSTER).glob("*.json")):
        data = rundir.read_json(path)
        if data is not None:
            data["calls"] = counters.read(path.with_suffix(".calls"), tuple(data["seams"]))
            data["tallies"] = counters.read(path.with_suffix(tallies.SUFFIX), tuple(data.get("tallied", ())))
            data["alive"] = data["start_time"] is not None and start_time(data["pid"]) == data["start_time"]
            found.append(data)
    return found


def remote(attested: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The LMCache servers that attest to the engines over their protocol and not in this run directory.

    Args:
        attested: What :func:`load` returned.

    Returns:
        Their attestations with ``url`` added, ``alive`` and the counts as of the last heartbeat of an engine (10 s).
        Several engines name one server; the newest word stands. Servers without vllm-splint have none.
    """
    here = {_process(entry) for entry in attested}
    found: dict[tuple[Any, ...], tuple[float, dict[str, Any]]] = {}
    for entry in attested:
        for url, said in entry.get("facts", {}).get(REMOTE, {}).items():
            server = said["server"]
            if not server or _process(server) in here:
                continue
            latest = {**server, "url": url, "alive": entry["alive"] and said["answering"]}
            if said["seen"] >= found.get(_process(server), (0.0, {}))[0]:
                found[_process(server)] = (said["seen"], latest)
    return [server for _, server in found.values()]


def everywhere(run_dir: Path) -> list[dict[str, Any]]:
    """What :func:`load` and :func:`remote` know of a server, together."""
    own = load(run_dir)
    return [*own, *remote(own)]


def _process(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return entry.get("host"), entry["pid"], entry.get("start_time")


def _key(entry: Mapping[str, Any]) -> tuple[str, Any, Any]:
    return entry["role"], entry.get("dp_rank"), entry.get("rank")


def name(entry: Mapping[str, Any]) -> str:
    """Role and ranks of one attestation, for people: ``worker DP0 rank 1``."""
    return _name(_key(entry))


def _name(key: tuple[str, Any, Any]) -> str:
    role, dp_rank, rank = key
    where = [f"DP{dp_rank}" if dp_rank is not None else "", f"rank {rank}" if rank is not None else ""]
    return " ".join([role, *(part for part in where if part)])


def name_of(entry: Mapping[str, Any]) -> str:
    """A process's name in messages: its role, with its ranks where it has some."""
    return _name(_key(entry))


def compare(expected: Iterable[Mapping[str, Any]], attested: Iterable[Mapping[str, Any]]) -> list[str]:
    """Hold the roster that the engine's parallel configuration demands against the attestations.

    Args:
        expected: Entries with ``role`` and, where the role has them, ``dp_rank`` and ``rank``. An LMCache server that
            shares the run directory need not be named; its patches are compared all the same.
        attested: What :func:`load` returned.

    Returns:
        One sentence for each problem, naming the process; empty where the roster is complete.
    """
    living: dict[tuple[str, Any, Any], Mapping[str, Any]] = {}
    problems = []
    for entry in (entry for entry in attested if entry["alive"]):
        first = living.setdefault(_key(entry), entry)
        if first is not entry and entry["role"] != Role.LMCACHE_SERVER.value:
            problems.append(f"{name(entry)} is there twice, as pid {first['pid']} and pid {entry['pid']}")
    wanted = {_key(entry) for entry in expected}
    problems += [
        f"{_name(key)} has not attested: it runs without the patches" for key in sorted(wanted - set(living), key=str)
    ]
    extra = {key for key in set(living) - wanted if key[0] != Role.LMCACHE_SERVER.value}
    problems += [f"{_name(key)} is not part of this server" for key in sorted(extra, key=str)]
    members = [living[key] for key in sorted(set(living) - extra, key=str)]
    for entry in members:
        problems += _member_problems(entry)
    problems += _differences(members)
    return problems


def _member_problems(entry: Mapping[str, Any]) -> list[str]:
    name = f"{_name(_key(entry))} (pid {entry['pid']})"
    problems = [
        f"{name}: patch {patch['id']} is {patch['state']}: {patch['reason']}"
        for patch in entry["patches"]
        if patch["state"] == State.REFUSED.value
    ]
    if Role(entry["role"]) in _VERIFIED_ROLES and not entry["plugin_verified"]:
        problems.append(
            f"{name}: the vllm_splint plugin did not run; VLLM_PLUGINS must name vllm_splint where it is set"
        )
    problems += [f"{name}: {target} is imported and bare" for target in entry["missed"]]
    return problems


def _differences(members: list[Mapping[str, Any]]) -> list[str]:
    """Members whose patch set, mode or library versions are not those of the first."""
    problems = []
    for entry in members[1:]:
        problems += [
            f"{_name(_key(entry))}: {field} is {entry[field]}, {_name(_key(members[0]))} has {members[0][field]}"
            for field in ("patch_set", "mode", "libraries")
            if entry[field] != members[0][field]
        ]
    return problems
