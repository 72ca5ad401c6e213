"""What is wrong with a request, found before anything is started."""

from __future__ import annotations

import re
from pathlib import Path

from entrypoint.local.plan import Plan
from entrypoint.local.ports import is_free
from patches.framework.errors import SplintError

__all__ = ["check"]

GIB = 1024**3
MEMORY_BYTES = 9 * GIB
"""Measured with the tiny model on the CPU: two engines, two workers, API server, coordinator, LMCache server."""
LAST_PORT = 65535

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$", re.ASCII)


def check(plan: Plan) -> None:
    """Raise at the first thing that can't work.

    Raises:
        SplintError: the port, the model or the memory.
    """
    _check_port(plan.port)
    if plan.model is None:
        _check_memory(_available_memory())
    else:
        _check_model(plan.model)


def _check_port(port: int) -> None:
    if not 1 <= port <= LAST_PORT:
        raise SplintError(f"port {port}", f"a number from 1 to {LAST_PORT}", "Give another one: make serve PORT=8001.")
    if not is_free(port):
        raise SplintError(
            f"port {port} is in use", "a free port", "End what listens there or choose another: make serve PORT=8001."
        )


def _check_model(model: str) -> None:
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SplintError(f"{folder} holds no config.json", "a model's folder", "Give the one with the weights.")
    elif folder.is_absolute() or model.startswith((".", "~")) or not _HUB_NAME.match(model):
        raise SplintError(
            f"there is no model at {folder}", "a folder with config.json, or a name on the model hub", "Correct MODEL=."
        )


def _check_memory(available: int) -> None:
    if available < MEMORY_BYTES:
        raise SplintError(
            f"{available / GIB:.1f} GiB of memory are free",
            f"{MEMORY_BYTES // GIB} GiB for two engines and the cache",
            "End something, or serve one rank: make serve ARGS='--data-parallel-size 1'."
            if available > MEMORY_BYTES // 2
            else "End something or use a larger machine.",
        )


def _available_memory() -> int:
    """Bytes that new processes can have."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
