"""The server's tallies as Prometheus counters: read from the run directory when somebody scrapes, never before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, multiprocess
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from patches.framework import roster, tallies

__all__ = ["TallyCollector", "publish"]


class TallyCollector(Collector):
    """Every metric of :data:`patches.framework.tallies.METRICS`, summed over the server's processes."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def describe(self) -> list[Any]:
        """Nothing, so that registering does not read the run directory."""
        return []

    def collect(self) -> Iterator[Any]:
        """One family a metric. Linear in processes."""
        sums = tallies.total(roster.load(self._run_dir))
        for metric in tallies.METRICS.values():
            family = CounterMetricFamily(f"splint_{metric.name}", metric.text, labels=metric.labels)
            for labels, count in sums[metric.name].items():
                family.add_metric(labels, count)
            yield family


def publish(run_dir: Path) -> None:
    """Show the tallies in ``/metrics``. Called once in each API server.

    With several API servers vLLM's endpoint makes a registry for each scrape, which holds prometheus_client's own
    collector of shared files and nothing else; so ours goes along with that one.
    """
    collector = TallyCollector(run_dir)
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        REGISTRY.register(collector)
        return
    shared: Callable[[Any], Iterator[Any]] = multiprocess.MultiProcessCollector.collect

    def collect(self: Any) -> Iterator[Any]:
        yield from shared(self)
        yield from collector.collect()

    multiprocess.MultiProcessCollector.collect = collect  # type: ignore[method-assign]
