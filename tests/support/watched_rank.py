"""One simulated DP rank in a process of its own, told over a pipe what to do."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from multiprocessing.connection import Connection

from torch.distributed import TCPStore

from patches.kv_budget.agreement import Agreement
from patches.kv_budget.channel import Channel
from patches.kv_budget.lifeline import Lifeline, address_towards
from patches.kv_budget.measurement import Hello
from patches.kv_budget.watching import Watch

__all__ = ["run"]


def run(rank: int, size: int, port: int, pipe: Connection, *, unseen: bool) -> None:
    """Meet the others, send ``watching``, then obey ``fail`` (ends with 3), ``up`` or ``end``.

    Ends with 1 where another rank failed, as an engine core does, and sends what it was told.
    """

    def stop(reason: str) -> None:
        pipe.send(reason)
        os._exit(1)

    store = TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False, timeout=timedelta(seconds=30))
    lifeline = Lifeline(address_towards("127.0.0.1"))
    own = Hello(rank, f"node{rank}", f"cuda:{rank}", lifeline.place)
    channel = Channel(store, rank, size)
    agreement = Agreement(channel, policy="align", ep_size=size, timeout_s=30)
    agreement.hello(own)
    watch = Watch(channel, own, stop, lifeline.close)
    watch.start(None if unseen else agreement.neighbour())
    watch.stage = "measuring its memory"
    pipe.send("watching")
    while (word := pipe.recv()) != "end":
        if word == "fail":
            watch.failed("RuntimeError: Error in memory profiling")
            sys.exit(3)
        watch.up()
        pipe.send("up")
