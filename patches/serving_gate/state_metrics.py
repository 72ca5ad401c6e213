"""What this server is at the moment, for ``/metrics``: ready or not, who runs, which patch set, how many calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from patches.framework import roster
from patches.framework.report import calls

__all__ = ["StateCollector"]

_PROCESS = ("role", "dp_rank", "rank")


class StateCollector(Collector):
    """Reads the roster when somebody scrapes.

    Args:
        run_dir: The server's run directory.
        ready: Whether the API server that is scraped is to get requests.
    """

    def __init__(self, run_dir: Path, ready: Callable[[], bool]) -> None:
        self._run_dir = run_dir
        self._ready = ready

    def describe(self) -> list[Any]:
        """Nothing, so that registering does not read the run directory."""
        return []

    def collect(self) -> Iterator[Any]:
        """One family a metric. Linear in processes."""
        processes = roster.everywhere(self._run_dir)
        yield GaugeMetricFamily("splint_ready", "Whether /readyz says yes.", value=float(self._ready()))
        yield _up(processes)
        yield _patch_sets(processes)
        yield _calls(processes)


def _up(processes: list[dict[str, Any]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("splint_process_up", "Whether a process that attested still runs.", labels=_PROCESS)
    for entry in processes:
        labels = ["" if entry.get(name) is None else str(entry[name]) for name in _PROCESS]
        family.add_metric(labels, float(entry["alive"]))
    return family


def _patch_sets(processes: list[dict[str, Any]]) -> GaugeMetricFamily:
    """More than one patch set in a deployment: servers of different images share its traffic."""
    text = "Processes by patch set, version and mode."
    family = GaugeMetricFamily("splint_patch_set_processes", text, labels=("patch_set", "version", "mode"))
    found: dict[tuple[str, str, str], int] = {}
    for entry in processes:
        key = (entry["patch_set"], entry["splint"], entry["mode"])
        found[key] = found.get(key, 0) + 1
    for labels, count in found.items():
        family.add_metric(labels, count)
    return family


def _calls(processes: list[dict[str, Any]]) -> CounterMetricFamily:
    family = CounterMetricFamily("splint_patch_calls", "Calls that went through a patch.", labels=("patch",))
    for patch, count in calls(processes).items():
        family.add_metric((patch,), count)
    return family
