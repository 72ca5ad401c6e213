"""The functions that every vLLM process starts in, each with its role noted on the way in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework import process, rundir
from patches.framework.records import Role, Seam
from patches.lmcache_identity.carrying import require_identity
from patches.supervision import SUPERVISOR_PID
from patches.supervision.command import is_serving

__all__ = ["headless", "launcher", "run_coordinator", "run_engine_core", "run_server_worker", "worker_main"]


def _noting(seam: Seam, note: Callable[..., None]) -> Callable[..., Any]:
    @wraps(seam.original)
    def start(*args: Any, **kwargs: Any) -> Any:
        seam.count()
        note(*args, **kwargs)
        return seam.original(*args, **kwargs)

    return start


def run_server_worker(seam: Seam) -> Callable[..., Any]:
    """API server; ``rank`` is its index among several."""

    def note(_address: str, _sock: Any, _args: Any, client_config: dict[str, Any] | None = None, **_: Any) -> None:
        process.start().take_role(Role.API_SERVER, rank=(client_config or {}).get("client_index", 0))
        _note_command()

    return _noting(seam, note)


def launcher(seam: Seam) -> Callable[..., Any]:
    """The parent of several API servers."""
    return _noting(seam, _note_launcher)


def headless(seam: Seam) -> Callable[..., Any]:
    """The parent of the engines of a headless node, whose server tells no phases."""

    def note(*_args: Any, **_kwargs: Any) -> None:
        _note_launcher()
        folder = rundir.current()
        if folder is not None:
            (folder / rundir.HEADLESS).touch()

    return _noting(seam, note)


def _note_launcher(*_args: Any, **_kwargs: Any) -> None:
    """Take the role and clear the run directory, where no supervising parent has.

    Where a program starts the server by a call there is none, and API servers that wait for the verdict must not find
    that of an earlier server.
    """
    process.start().take_role(Role.LAUNCHER)
    _note_command()
    folder = rundir.current()
    if folder is not None and SUPERVISOR_PID not in os.environ:
        rundir.forget_opening(folder)


def _note_command() -> None:
    """Whether a command of vLLM's runs here, which parses its arguments, or a program that has made them itself."""
    process.start().note(command=is_serving(sys.orig_argv))


def run_engine_core(seam: Seam) -> Callable[..., Any]:
    """Engine core of one data-parallel rank."""

    def note(*_args: Any, vllm_config: Any, dp_rank: int = 0, **_kwargs: Any) -> None:
        process.start().take_role(Role.ENGINE_CORE, dp_rank=dp_rank)
        process.start().take_config(vllm_config)
        require_identity(vllm_config)

    return _noting(seam, note)


def worker_main(seam: Seam) -> Callable[..., Any]:
    """Worker; ``rank`` counts the workers of its engine (TP x PP)."""

    def note(*_args: Any, vllm_config: Any, rank: int = 0, **_kwargs: Any) -> None:
        process.start().take_role(Role.WORKER, dp_rank=vllm_config.parallel_config.data_parallel_index, rank=rank)

    return _noting(seam, note)


def run_coordinator(seam: Seam) -> Callable[..., Any]:
    """The coordinator of data-parallel waves."""
    return _noting(seam, lambda *_args, **_kwargs: process.start().take_role(Role.DP_COORDINATOR))
