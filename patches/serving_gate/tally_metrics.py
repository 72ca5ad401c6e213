"""The server's tallies as Prometheus counters: read from the run directory when somebody scrapes, never before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from patches.framework import roster, tallies

__all__ = ["TallyCollector"]


class TallyCollector(Collector):
    """Every metric of :data:`patches.framework.tallies.METRICS`, summed over the server's processes."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def describe(self) -> list[Any]:
        """Nothing, so that registering does not read the run directory."""
        return []

    def collect(self) -> Iterator[Any]:
        """One family a metric. Linear in processes."""
        sums = tallies.total(roster.everywhere(self._run_dir))
        for metric in tallies.METRICS.values():
            family = CounterMetricFamily(f"splint_{metric.name}", metric.text, labels=metric.labels)
            for labels, count in sums[metric.name].items():
                family.add_metric(labels, count)
            yield family
