"""Collectors that read the run directory when somebody scrapes, under one API server or several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY, multiprocess
from prometheus_client.registry import Collector

__all__ = ["register"]


def register(collector: Collector) -> None:
    """Show ``collector`` in this API server's ``/metrics``.

    With several API servers vLLM's endpoint makes a registry for each scrape, which holds prometheus_client's own
    collector of shared files and nothing else; so ours goes along with that one.
    """
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        REGISTRY.register(collector)
        return
    shared: Callable[[Any], Iterator[Any]] = multiprocess.MultiProcessCollector.collect

    def collect(self: Any) -> Iterator[Any]:
        yield from shared(self)
        yield from collector.collect()

    multiprocess.MultiProcessCollector.collect = collect  # type: ignore[method-assign]
