"""What a run directory tells of its server."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import patches
from patches.framework import roster, rundir, tallies
from patches.framework.records import Role
from patches.supervision.living import SUPERVISOR

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SCHEMA", "calls", "kv_budget", "report"]

SCHEMA = 1


def report(run_dir: Path) -> dict[str, Any]:
    """Everything that is known about a server's patches, processes and verdict. Linear in processes.

    Works while the gate is closed, and after the server has ended where its run directory was kept.
    """
    own = roster.load(run_dir)
    processes = [*own, *roster.remote(own)]
    verdict = rundir.read_json(run_dir / rundir.VERDICT)
    return {
        "schema": SCHEMA,
        **(rundir.read_json(run_dir / rundir.PHASE) or {"phase": _without_gate(own)}),
        "history": _history(run_dir),
        "version": patches.__version__,
        "mode": processes[0]["mode"] if processes else None,
        "libraries": processes[0]["libraries"] if processes else {},
        "kv_cache": _kv_cache(processes),
        "kv_profiles": _kv_profiles(processes),
        "lmcache": _lmcache(processes),
        "lmcache_servers": _lmcache_servers(own),
        "patches": [_patch(patch, processes) for patch in patches.catalogue()],
        "processes": processes,
        "kv_budget": kv_budget(processes),
        "verdict": verdict,
        "smoke_so_far": [] if verdict else rundir.read_json(run_dir / rundir.SMOKE_SO_FAR) or [],
        "timings_ms": _timings(processes),
    }


def _without_gate(processes: list[dict[str, Any]]) -> str:
    """The phase where no API server has told one: it will, unless an LMCache server has the folder to itself."""
    return "cache server" if {entry["role"] for entry in processes} == {Role.LMCACHE_SERVER.value} else "loading"


def _history(run_dir: Path) -> list[dict[str, Any]]:
    """The phases so far, each with its beginning; that of loading is known where there is a supervising parent."""
    since = (rundir.read_json(run_dir / SUPERVISOR) or {}).get("since")
    history: list[dict[str, Any]] = (rundir.read_json(run_dir / rundir.PHASE) or {}).get("history", [])
    if since is None:
        return history
    return [{"phase": "loading", "since": datetime.fromtimestamp(since, timezone.utc).isoformat()}, *history]


def _kv_cache(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """The engine's KV dtype, and ``SPLINT_KV_DTYPE`` where that pinned it; empty until an engine core has started."""
    facts: dict[str, Any] = next((entry["facts"] for entry in processes if "kv_cache_dtype" in entry["facts"]), {})
    names = {"kv_cache_dtype": "dtype", "kv_cache_dtype_pinned": "pinned"}
    return {name: facts[fact] for fact, name in names.items() if fact in facts}


def kv_budget(processes: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The KV budget of the engine cores: one row a DP rank, or why there was nothing to agree on.

    DP0 knows the ranks of all nodes; another node's report shows its own ranks only. None before the first budget.
    """
    said = [entry["facts"]["kv_budget"] for entry in processes if "kv_budget" in entry.get("facts", {})]
    if not said:
        return None
    whole = next((facts for facts in said if facts.get("ranks")), None)
    rows = whole["ranks"] if whole else [row for facts in said for row in facts.get("own", [])]
    first = whole or said[0]
    return {"applies": first["applies"], "reason": first.get("reason"), "policy": first.get("policy"), "ranks": rows}


def _lmcache(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the external cache did and did not do so far, over all processes; empty before the first count."""
    if not any(entry["tallies"] for entry in processes):
        return []
    return [
        {"name": name, "labels": dict(zip(tallies.METRICS[name].labels, labels, strict=True)), "count": count}
        for name, found in tallies.total(processes).items()
        for labels, count in found.items()
        if name in tallies.METRICS
    ]


def _lmcache_servers(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each engine says of each LMCache server that it uses: one row an address, of the last word about it."""
    rows: dict[str, dict[str, Any]] = {}
    for entry in processes:
        for url, said in entry.get("facts", {}).get(roster.REMOTE, {}).items():
            if said["seen"] >= rows.get(url, {"seen": 0.0})["seen"]:
                rows[url] = {"url": url, **said, "answering": entry["alive"] and said["answering"]}
    return [{**row, "server": _in_short(row["server"])} for row in rows.values()]


def _in_short(server: dict[str, Any] | None) -> dict[str, Any] | None:
    """The rest of a server's attestation stands among the processes."""
    names = ("host", "pid", "splint", "mode", "patch_set", "libraries")
    return {name: server[name] for name in names} if server else None


def _kv_profiles(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each engine's cached KV is, with the fingerprint in its keys; engines without LMCache have no entry."""
    return [
        {"dp_rank": entry["dp_rank"], **entry["facts"]["kv_profile"]}
        for entry in processes
        if entry["role"] == Role.ENGINE_CORE.value and "kv_profile" in entry["facts"]
    ]


def _patch(patch: Any, processes: list[dict[str, Any]]) -> dict[str, Any]:
    """A patch's record, its states over the processes, and the calls that its seams took."""
    states = [found for entry in processes for found in entry["patches"] if found["id"] == patch.id]
    return {
        "id": patch.id,
        "purpose": patch.purpose,
        "library": patch.library,
        "releases": patch.releases,
        "upstream": list(patch.upstream),
        "retires": patch.retires,
        "states": {found["state"]: found["reason"] for found in states},
        "calls": _calls(patch, processes),
    }


def calls(processes: list[dict[str, Any]]) -> dict[str, int]:
    """Calls that went through each patch, over all processes, by the patch's id."""
    return {patch.id: _calls(patch, processes) for patch in patches.catalogue()}


def _calls(patch: Any, processes: list[dict[str, Any]]) -> int:
    names = {target.name for target in patch.targets}
    return sum(count for entry in processes for seam, count in entry["calls"].items() if seam in names)


def _timings(processes: list[dict[str, Any]]) -> dict[str, float]:
    """Start-up work of our own, summed over all processes, in milliseconds a phase."""
    total: dict[str, float] = {}
    for entry in processes:
        for phase, spent in entry["timings_ms"].items():
            total[phase] = round(total.get(phase, 0.0) + spent, 3)
    return total
