"""``/splint/report`` for people. It shows what is there: reports of other releases may say less or more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from patches.framework import rundir
from patches.framework.errors import SplintError
from patches.framework.report import report as report_of
from patches.supervision import living

__all__ = ["DEFAULT_URL", "fetch", "from_folder", "newest_folder", "render"]

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 5.0

_COLOURS = {"passed": "green", "applied": "green", "failed": "red", "refused": "red", "skipped": "yellow"}


def fetch(base_url: str, api_key: str | None = None) -> dict[str, Any]:
    """The report of the server at ``base_url``; also what a closed gate answers.

    Raises:
        SplintError: nothing answers there, something without a report, or one that wants another key.
    """
    url = f"{base_url.rstrip('/')}/splint/report"
    remedy = "Give the server's address with --base-url; is it vllm-splint, and not SPLINT_MODE=off?"
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        response = httpx.get(url, headers=headers, timeout=TIMEOUT_S, trust_env=False)
        report = response.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SplintError(f"no answer from {url} ({error})", "a running server", remedy) from error
    except ValueError as error:
        raise SplintError(f"HTTP {response.status_code} from {url}, not JSON", "a report", remedy) from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        key = "Give it with --api-key or VLLM_API_KEY."
        raise SplintError(f"HTTP 401 from {url}", "the server's API key", key)
    if not isinstance(report, dict) or "phase" not in report:
        raise SplintError(f"HTTP {response.status_code} from {url}", "a report", remedy)
    return report


def newest_folder() -> Path | None:
    """The run directory to report from, or None.

    It is that of this user's newest living server on this machine, else of an LMCache server that lives without one,
    else of the newest server that ended.
    """
    named = rundir.current()
    if named is not None:
        return named if (named / rundir.PHASE).exists() or living.has_cache_server(named) else None
    folders = [path for path in living.private_folders() if (path / rundir.PHASE).exists()]
    return next(chain(filter(living.is_living, folders), living.cache_server_folders(), folders), None)


def from_folder(folder: Path) -> dict[str, Any]:
    """What a run directory tells of its server: works while the gate is closed and after the server has ended."""
    return {**report_of(folder), "run_dir": str(folder)}


def _coloured(word: str) -> Text:
    return Text(word, _COLOURS.get(word, ""))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _head(report: dict[str, Any]) -> Text:
    libraries = report.get("libraries") or {}
    phase = report.get("phase", "unknown")
    processes = report.get("processes") or []
    ended = bool(processes) and not any(process.get("alive", True) for process in processes)
    parts = [
        f"ended (the last phase was {phase})" if ended else f"phase {phase}",
        f"mode {report['mode']}" if report.get("mode") else "",
        f"vllm-splint {report['version']}" if report.get("version") else "",
        *(f"{library} {version}" for library, version in libraries.items()),
        _kv_cache(report.get("kv_cache") or {}),
        str(report.get("run_dir") or ""),
    ]
    return Text(" · ".join(filter(None, parts)), "bold")


def _kv_cache(found: dict[str, Any]) -> str:
    if not found.get("dtype"):
        return ""
    return f"KV cache {found['dtype']}" + (f" (SPLINT_KV_DTYPE={found['pinned']})" if found.get("pinned") else "")


def _patches(report: dict[str, Any]) -> Iterator[RenderableType]:
    rows = report.get("patches") or []
    if not rows:
        return
    table = _table("Patches", "id", "states", "calls", "purpose")
    for row in rows:
        states = row.get("states") or {}
        shown = Text(", ").join(_coloured(state) for state in states) if states else Text("in no process", "yellow")
        table.add_row(str(row.get("id", "?")), shown, str(row.get("calls", "")), str(row.get("purpose", "")))
    yield table


def _kv_profiles(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Lines instead of a table: digests are to be compared, so they must stay whole on a narrow terminal."""
    lines = [
        f"{_where(row) or 'engine'}: {row.get('fingerprint', '?')}\n  {row.get('summary', '?')}\n"
        f"  weights {row.get('weights', '?')}\n  digest {row.get('digest', '?')}"
        for row in report.get("kv_profiles") or []
    ]
    if lines:
        yield Text("\n".join(["KV in LMCache's keys", *lines]))


def _where(process: dict[str, Any]) -> str:
    ranks = {"DP": process.get("dp_rank"), "rank ": process.get("rank")}
    return " ".join(f"{name}{rank}" for name, rank in ranks.items() if rank is not None)


def _applied(process: dict[str, Any]) -> str:
    rows = process.get("patches") or []
    return f"{sum(row.get('state') == 'applied' for row in rows)} of {len(rows)}"


def _processes(report: dict[str, Any]) -> Iterator[RenderableType]:
    rows = report.get("processes") or []
    if not rows:
        return
    table = _table("Processes", "role", "ranks", "pid", "alive", "applied", "plugin", "patch set")
    for row in rows:
        table.add_row(
            str(row.get("role", "?")),
            _where(row),
            str(row.get("pid", "")),
            "yes" if row.get("alive", True) else Text("no", "red"),
            _applied(row),
            "verified" if row.get("plugin_verified") else "",
            str(row.get("patch_set", "")),
        )
    yield table


def _lmcache_servers(report: dict[str, Any]) -> Iterator[RenderableType]:
    rows = report.get("lmcache_servers") or []
    if not rows:
        return
    table = _table("LMCache servers, as the engines know them", "address", "answers", "what it is")
    for row in rows:
        answers = "yes" if row.get("answering") else Text("no", "red")
        table.add_row(str(row.get("url", "?")), answers, _what_it_is(row))
    yield table


def _what_it_is(row: dict[str, Any]) -> Text:
    server = row.get("server") or {}
    where = f" on {server['host']}, patch set {server['patch_set']}" if server else ""
    if not row.get("fault"):
        return Text(f"vllm-splint {server.get('splint', '?')}{where}")
    accepted = " (accepted by SPLINT_LMCACHE_UNPROTECTED)" if row.get("accepted") else ""
    return Text(f"{row['fault']}{where}{accepted}", "red")


def _kv_budget(report: dict[str, Any]) -> Iterator[RenderableType]:
    budget = report.get("kv_budget")
    if not budget:
        return
    said = f"one for all ({budget['policy']})" if budget.get("applies") else f"not applicable: {budget.get('reason')}"
    table = _table(
        f"KV budget: {said}", "rank", "blocks", "tokens", "max length", "given up", "measured blocks", "where"
    )
    for row in budget.get("ranks") or []:
        cells = (
            row.get(name, "") for name in ("blocks", "tokens", "max_model_len", "tokens_given_up", "measured_blocks")
        )
        where = " ".join(filter(None, (row.get("host"), row.get("device"))))
        table.add_row(f"DP{row.get('dp_rank')}", *map(str, cells), where)
    yield table


def _verdict(report: dict[str, Any]) -> Iterator[RenderableType]:
    verdict = report.get("verdict")
    if not verdict:
        return
    status = str(verdict.get("status", "unknown"))
    table = _table(f"Smoke tests: {status} in {verdict.get('seconds', '?')} s", "check", "status", "s", "what it says")
    for check in verdict.get("checks") or []:
        said = check.get("reason") or check.get("proves") or ""
        table.add_row(
            str(check.get("id", "?")), _coloured(str(check.get("status", "?"))), f"{check.get('seconds', 0):.2f}", said
        )
    yield table


def _timings(report: dict[str, Any]) -> Iterator[RenderableType]:
    timings = report.get("timings_ms") or report.get("timings") or {}
    if timings:
        spent = ", ".join(f"{phase} {value:.0f}" for phase, value in timings.items() if isinstance(value, (int, float)))
        yield Text(f"Start-up work over all processes, in ms: {spent}")


def render(report: dict[str, Any]) -> RenderableType:
    """The report as tables; parts that it does not have are left out."""
    parts = [
        _head(report),
        *_kv_profiles(report),
        *_patches(report),
        *_processes(report),
        *_lmcache_servers(report),
        *_kv_budget(report),
        *_verdict(report),
        *_timings(report),
    ]
    return Group(*(piece for part in parts for piece in (part, Text())))
