"""What the external KV cache did and did not do, counted by reason, for ``/metrics`` and the server's report.

Like the call counters, the numbers lie in one small file a process, so that any process of the server can read them
while they move. Nothing here is on a path of every token: a count costs about 1 µs and comes once a request or trouble.
Standard library only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from patches.framework.counters import Counters

__all__ = [
    "METRICS",
    "SUFFIX",
    "Metric",
    "add",
    "due",
    "is_cell",
    "miss",
    "names",
    "on_new_name",
    "reset",
    "share",
    "snapshot",
    "total",
]

logger = logging.getLogger(__name__)

SUFFIX = ".tally"
LOGGED_EVERY_S = 60.0


@dataclass(frozen=True)
class Metric:
    """A counter: ``splint_<name>_total`` in ``/metrics``.

    Attributes:
        name: Without prefix and suffix.
        text: One line for people.
        labels: Names of its labels.
        known: Label values that are shown as 0 before the first count.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()


METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "lmcache_misses",
            "Look-ups and loads that gave no KV although LMCache might have had it, and were computed instead.",
            ("reason", "tier"),
            (
                ("lookup_unanswered", "server"),
                ("prefetch_unfinished", "server"),
                ("server_lost", "server"),
                ("server_away", "server"),
                ("load_failed", "server"),
            ),
        ),
        Metric(
            "lmcache_saved_tokens", "Prompt tokens whose KV was loaded from LMCache instead of computed.", (), ((),)
        ),
        Metric("lmcache_recomputed_tokens", "Prompt tokens computed because their load failed.", (), ((),)),
        Metric(
            "lmcache_stored_tokens",
            "Tokens of stores that LMCache confirmed, chunks that it had already included, by rank 0 of each engine.",
            (),
            ((),),
        ),
        Metric(
            "lmcache_stored_bytes",
            "Bytes of those tokens' KV on that rank, by the size of a token; not bytes moved.",
            (),
            ((),),
        ),
        Metric(
            "lmcache_lost_stores",
            "Stores that came to nothing, by every rank.",
            ("reason",),
            (("server_unavailable",), ("connection_changed",), ("refused",)),
        ),
        Metric(
            "lmcache_outages",
            "Changes of what an engine's process knows of its LMCache server.",
            ("change",),
            (("lost",), ("silent",), ("recovered",)),
        ),
    )
}

_cells = Counters()
_said: dict[str, tuple[float, int]] = {}
_lock = threading.Lock()
_new_name: Callable[[], None] | None = None


def on_new_name(call: Callable[[], None]) -> None:
    """Have ``call`` made whenever a tally gets its first count: who reads the file must know the names in it."""
    global _new_name
    _new_name = call


def _cell(name: str, labels: Iterable[str]) -> str:
    return " ".join((name, *labels))


def add(name: str, *labels: str, count: int = 1) -> None:
    """Count ``count`` more.

    Args:
        name: A key of :data:`METRICS`.
        labels: A value for each of the metric's labels, without spaces, from a set that does not grow with requests.
        count: At least 0.

    Raises:
        ValueError: the labels are not those of the metric, or a value is not one word.
    """
    if len(labels) != len(METRICS[name].labels) or any(label.split() != [label] for label in labels):
        raise ValueError(f"{name} takes {METRICS[name].labels}, one word each, not {labels}")
    cell = _cell(name, labels)
    new = cell not in _cells.names
    with _lock:
        _cells.increase(cell, count)
    if new and _new_name is not None:
        _new_name()


def is_cell(name: str) -> bool:
    """Whether ``name``, which another process counted, is one of a metric that this release has."""
    metric, *labels = name.split(" ")
    return metric in METRICS and len(labels) == len(METRICS[metric].labels)


def miss(reason: str, tier: str, detail: str, count: int = 1) -> None:
    """Count look-ups or loads that gave no KV; each reason is logged once a minute at most.

    Args:
        reason: Why, as one word, such as ``wrong_size``.
        tier: Where the KV was looked for: ``server``, ``l1``, ``fs``, ``fs_native``, ``redis``, ``resp``, ``lm`` …
        detail: A sentence for the log, without anything of a prompt in it.
        count: How many.
    """
    add("lmcache_misses", reason, tier, count=count)
    since = due(f"{reason} {tier}", count)
    if since:
        logger.warning("LMCache %s (%s), %d time(s) since last said: %s", reason, tier, since, detail)


def due(what: str, count: int) -> int:
    """How many of ``what``, a bounded set of texts, are to be logged now: 0 within a minute of the last time."""
    now = time.monotonic()
    with _lock:
        last, held = _said.get(what, (float("-inf"), 0))
        due = now - last >= LOGGED_EVERY_S
        _said[what] = (now, 0) if due else (last, held + count)
    return held + count if due else 0


def names() -> tuple[str, ...]:
    """What this process has counted, in the order of its file: metric and label values, with spaces between."""
    return _cells.names


def share(path: Path) -> None:
    """Go on counting in the file at ``path``."""
    with _lock:
        _cells.share(path)


def reset() -> None:
    """Start from zero, as a forked child must."""
    _cells.reset()


def snapshot() -> dict[str, int]:
    """This process's counts by cell name."""
    return _cells.values()


def total(processes: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[tuple[str, ...], int]]:
    """Sums over processes, by metric and label values.

    Args:
        processes: Attestations as :func:`patches.framework.roster.load` returns them. Ended processes count too.
    """
    sums: dict[str, dict[tuple[str, ...], int]] = {
        metric.name: dict.fromkeys(metric.known, 0) for metric in METRICS.values()
    }
    for process in processes:
        for cell, count in process.get("tallies", {}).items():
            name, *labels = cell.split(" ")
            found = sums.setdefault(name, {})
            found[tuple(labels)] = found.get(tuple(labels), 0) + count
    return sums
