"""One simulated DP rank in a process of its own, told over a pipe what to do.

``python -m support.watched_rank RANK SIZE ADDRESS PORT [KEEPALIVE]`` is the same over standard input and output, with
its store at that address; ``KEEPALIVE`` is seconds of idleness, seconds between probes and probes: ``1,1,2``.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Protocol

from torch.distributed import TCPStore

from patches.kv_budget import lifeline
from patches.kv_budget.agreement import Agreement
from patches.kv_budget.channel import Channel
from patches.kv_budget.measurement import Hello
from patches.kv_budget.watching import Watch

__all__ = ["run"]


class Pipe(Protocol):
    def send(self, text: str) -> None: ...
    def recv(self) -> str: ...


class Standard:
    """Lines of standard input and output."""

    def send(self, text: str) -> None:
        print(text, flush=True)

    def recv(self) -> str:
        return sys.stdin.readline().strip()


def run(rank: int, size: int, port: int, pipe: Pipe, *, unseen: bool = False, address: str = "127.0.0.1") -> None:
    """Meet the others, send ``watching``, then obey ``fail`` (ends with 3), ``up`` or ``end``.

    Ends with 1 where another rank failed, as an engine core does, and sends what it was told.
    """

    def stop(reason: str) -> None:
        pipe.send(reason)
        os._exit(1)

    store = TCPStore(address, port, None, rank == 0, wait_for_workers=False, timeout=timedelta(seconds=30))
    line = lifeline.Lifeline(lifeline.address_towards(address))
    own = Hello(rank, f"node{rank}", f"cuda:{rank}", line.place)
    channel = Channel(store, rank, size)
    agreement = Agreement(channel, policy="align", ep_size=size, timeout_s=30)
    agreement.hello(own)
    watch = Watch(channel, own, stop, line.close)
    watch.start([] if unseen else agreement.watched())
    watch.stage = "measuring its memory"
    while not unseen and len(line._held) < (size - 1 if rank == 0 else 1):
        time.sleep(0.01)  # until those who watch this rank, in threads of their own, are connected
    pipe.send("watching")
    while (word := pipe.recv()) != "end":
        if word == "fail":
            watch.failed("RuntimeError: Error in memory profiling")
            sys.exit(3)
        watch.up()
        pipe.send("up")


if __name__ == "__main__":
    number, of, place, at, *keepalive = sys.argv[1:]
    if keepalive:
        lifeline.IDLE_S, lifeline.INTERVAL_S, lifeline.PROBES = map(int, keepalive[0].split(","))
    run(int(number), int(of), int(at), Standard(), address=place)
