"""The default of ``--shutdown-timeout``, and the wait before an API server lets go of its engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework.records import Seam
from patches.serving_gate.drain import ATTRIBUTE
from patches.supervision import DRAIN_S

__all__ = ["make_arg_parser", "shutdown"]


def make_arg_parser(seam: Seam) -> Callable[..., Any]:
    """Give ``--shutdown-timeout`` another default; a value on the command line or in a file still wins."""

    @wraps(seam.original)
    def with_drain(*args: Any, **kwargs: Any) -> Any:
        seam.count()
        parser = seam.original(*args, **kwargs)
        parser.set_defaults(shutdown_timeout=DRAIN_S)
        return parser

    return with_drain


def shutdown(seam: Seam) -> Callable[..., None]:
    """Drain before the engines are told, where a gate has let requests in."""

    @wraps(seam.original)
    def drained(self: Any, timeout: float | None = None) -> None:
        seam.count()
        drain = getattr(self, ATTRIBUTE, None)
        seam.original(self, timeout=timeout if drain is None else drain.run(timeout))

    return drained
