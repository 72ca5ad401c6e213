"""Patch states and the smoke verdict as Prometheus gauges, beside vLLM's own in ``/metrics``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client import Gauge

import patches
from patches.framework import roster
from patches.framework.report import kv_budget
from patches.serving_gate.plan import Verdict
from patches.serving_gate.registering import register
from patches.serving_gate.tally_metrics import TallyCollector

__all__ = ["publish"]

_PROCESS = ("role", "dp_rank", "rank")


def _gauge(name: str, text: str, *labels: str) -> Any:
    """A gauge that also works where several API servers share one directory of metrics (vLLM's own choice of mode)."""
    return Gauge(name, text, labels, multiprocess_mode="mostrecent")


def publish(verdict: Verdict, run_dir: Path) -> None:
    """Set the gauges from the verdict and the roster, and let the tallies be read. Called once, with the verdict."""
    register(TallyCollector(run_dir))
    checks = _gauge("splint_smoke_check", "Smoke check: 1 passed, 0 failed, -1 does not apply.", "check")
    for check in verdict.checks:
        checks.labels(check.id).set({"passed": 1, "failed": 0}.get(check.status, -1))
    _gauge("splint_smoke_passed", "Whether the smoke tests passed.", "level").labels(verdict.level).set(
        verdict.status == "passed"
    )
    _gauge("splint_smoke_seconds", "Duration of the smoke tests in seconds.").set(verdict.seconds)
    info = _gauge("splint_patch_info", "State of each patch in each process.", "patch", "state", "version", *_PROCESS)
    processes = roster.load(run_dir)
    blocks = _gauge("splint_kv_blocks", "KV blocks of each DP rank.", "dp_rank")
    for row in (kv_budget(processes) or {"ranks": []})["ranks"]:
        blocks.labels(str(row["dp_rank"])).set(row["blocks"])
    for entry in processes:
        process = tuple("" if entry.get(name) is None else str(entry[name]) for name in _PROCESS)
        for patch in entry["patches"]:
            info.labels(patch["id"], patch["state"], patches.__version__, *process).set(1)
