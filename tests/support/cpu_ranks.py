"""Real gloo ranks in processes of their own, with vLLM's CPU communicator, that run jobs for a test."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from patches.framework.records import Seam

__all__ = ["Job", "Ranks", "ranks"]

Job = Callable[..., Any]
"""Called in each rank with its communicator and its own arguments; top-level, so that it can be sent."""


class Ranks:
    """The processes of one group."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    def run(self, job: Job, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run ``job`` in every rank at once, each with its own ``arguments``; returns the results in rank order.

        Raises:
            RuntimeError: a rank raised; the message has the exception of every rank.
        """
        for connection, own in zip(self._connections, arguments, strict=True):
            connection.send((job, own))
        answers = [connection.recv() for connection in self._connections]
        if any(failed for failed, _ in answers):
            raise RuntimeError("; ".join(str(answer) for _, answer in answers))
        return [answer for _, answer in answers]


@contextmanager
def ranks(size: int, folder: Path, *, patched: bool) -> Iterator[Ranks]:
    """Start ``size`` ranks and end them on leaving. ``patched`` decides whether the communicator has the patch."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(
            target=_serve, args=(rank, size, str(folder / f"rendezvous-{patched}"), theirs, patched), daemon=True
        )
        for rank, (_, theirs) in enumerate(pipes)
    ]
    before = os.environ.get("SPLINT_MODE")
    os.environ["SPLINT_MODE"] = "off"
    try:
        for process in processes:
            process.start()
    finally:
        _restore("SPLINT_MODE", before)
    try:
        yield Ranks([ours for ours, _ in pipes])
    finally:
        for process in processes:
            process.kill()
            process.join()


def _restore(name: str, value: str | None) -> None:
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value


def _serve(rank: int, size: int, rendezvous: str, connection: Connection, patched: bool) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    communicator = _communicator(patched)
    while True:
        job, arguments = connection.recv()
        try:
            connection.send((False, job(communicator, *arguments)))
        except Exception as error:  # noqa: BLE001  (whatever it is, the test must see it)
            connection.send((True, f"rank {rank}: {type(error).__name__}: {error}"))


def _communicator(patched: bool) -> Any:
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    from patches.cpu_expert_parallel import wrappers

    if patched:
        for name in ("all_gatherv", "reduce_scatterv"):
            setattr(CpuCommunicator, name, getattr(wrappers, name)(Seam(name, None, lambda: None)))
    return CpuCommunicator(dist.group.WORLD, device_group=dist.group.WORLD, unique_name="dp:0")
