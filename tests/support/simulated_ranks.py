"""DP ranks as threads around one real store: the agreement's own code, without engines."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from patches.kv_budget.agreement import Agreement
from patches.kv_budget.budget import RankBlocks
from patches.kv_budget.channel import Channel
from patches.kv_budget.measurement import Hello, Measurement

__all__ = ["Outcome", "hello", "measurement", "simulate", "store"]

BLOCK_SIZE = 16
BYTES_PER_BLOCK = 16384


def store() -> Any:
    """A store on loopback, as DP0 has it."""
    from torch.distributed import TCPStore

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, 16384):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=timedelta(seconds=60))


def hello(rank: int, **flags: Any) -> Hello:
    """Where a simulated rank says it is."""
    return Hello(rank, f"node{rank // 8}", f"cuda:{rank % 8}", ("127.0.0.1", 9), flags)


def measurement(rank: int, memory: Sequence[int], bytes_per_block: Sequence[int] = (), **more: Any) -> Measurement:
    """What a simulated rank measured, in bytes a worker."""
    each = tuple(bytes_per_block) or (BYTES_PER_BLOCK,) * len(memory)
    return Measurement(rank, f"node{rank // 8}", f"cuda:{rank % 8}", tuple(memory), each, BLOCK_SIZE, **more)


@dataclass
class Outcome:
    """What became of a rank."""

    memory: list[int] = field(default_factory=list)
    blocks: int = 0
    error: Exception | None = None
    cpu_s: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)


def plan(own: Measurement, memory: list[int]) -> int:
    """Blocks that an engine plans with these bytes, or its override."""
    return own.blocks_in(tuple(memory)) if own.override is None else own.override


def simulate(
    measurements: Sequence[Measurement],
    *,
    policy: str = "align",
    timeout_s: float = 30.0,
    ep_size: int = 1,
    silent: Sequence[int] = (),
    plan: Callable[[Measurement, list[int]], int] = plan,
    max_model_len: Callable[[int], int] = lambda _: 128,
    greet: Callable[[int], Hello] = hello,
) -> tuple[list[Outcome], float]:
    """Let the ranks agree.

    Returns:
        One outcome a rank, and the seconds from the first word to the last answer.
    """
    server = store()
    outcomes = [Outcome() for _ in measurements]
    together = threading.Barrier(len(measurements) - len(silent) + 1)

    def run(rank: int) -> None:
        outcome, own = outcomes[rank], measurements[rank]
        agreement = Agreement(
            Channel(server.clone(), rank, len(measurements)), policy=policy, ep_size=ep_size, timeout_s=timeout_s
        )
        together.wait()
        worked = time.thread_time()
        try:
            agreement.hello(greet(rank))
            outcome.memory = agreement.measured(own)
            outcome.blocks = plan(own, outcome.memory)
            agreement.planned(RankBlocks(rank, 0, outcome.blocks, own.block_size), max_model_len(rank))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            outcome.error = error
        outcome.cpu_s = time.thread_time() - worked
        outcome.rows = agreement.rows

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(measurements)) if rank not in silent]
    for thread in threads:
        thread.start()
    with _long_turns():
        together.wait()
        started = time.monotonic()
        for thread in threads:
            thread.join()
        return outcomes, time.monotonic() - started


@contextmanager
def _long_turns() -> Iterator[None]:
    """Ranks are processes; threads that stand for them share one interpreter, and wait for it in turns of 5 ms.

    A thousand that wake every 5 ms to ask for it leave the one that has it no processor: minutes on a busy machine.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
