"""Prometheus text, reduced to what the checks ask: how far did a family move on one engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "EXTERNAL_HITS",
    "EXTERNAL_QUERIES",
    "PREFIX_HITS",
    "PREFIX_QUERIES",
    "PROMPT_TOKENS",
    "REQUESTS",
    "Counters",
    "parse",
]

PREFIX_HITS = "vllm:prefix_cache_hits_total"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
EXTERNAL_QUERIES = "vllm:external_prefix_cache_queries_total"
REQUESTS = "vllm:request_success_total"
PROMPT_TOKENS = "vllm:prompt_tokens_total"

_SAMPLE = re.compile(r"^(?P<name>vllm:\w+)\{(?P<labels>.*)\} (?P<value>\S+)", re.MULTILINE)
_ENGINE = re.compile(r'(?:^|,)engine="(\d+)"')


@dataclass(frozen=True)
class Counters:
    """One reading of ``/metrics``: ``(family, engine)`` to its sum over all other labels."""

    values: dict[tuple[str, int], float]

    def __bool__(self) -> bool:
        """Whether the server counts at all; ``--disable-log-stats`` leaves nothing."""
        return bool(self.values)

    def value(self, family: str, engine: int) -> float:
        """The sum that ``engine`` has in ``family``, 0 where it has none."""
        return self.values.get((family, engine), 0.0)

    def moved(self, before: Counters, family: str, engine: int) -> int:
        """By how much ``family`` grew on ``engine`` since ``before``; tokens or requests, never a fraction."""
        return round(self.value(family, engine) - before.value(family, engine))


def _samples(text: str) -> Iterator[tuple[str, int, float]]:
    for sample in _SAMPLE.finditer(text):
        engine = _ENGINE.search(sample["labels"])
        if engine:
            yield sample["name"], int(engine[1]), float(sample["value"])


def parse(text: str) -> Counters:
    """Read Prometheus' text format, version 0.0.4."""
    values: dict[tuple[str, int], float] = {}
    for name, engine, value in _samples(text):
        values[name, engine] = values.get((name, engine), 0.0) + value
    return Counters(values)
