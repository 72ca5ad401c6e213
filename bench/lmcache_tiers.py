"""Bytes per second through an LMCache server's second level, with and without seals, in turns in one process.

    SPLINT_MODE=off python bench/lmcache_tiers.py fs /tmp/cache --object-mib 4 --objects 32 --rounds 15
    SPLINT_MODE=off python bench/lmcache_tiers.py resp 127.0.0.1:6379

Each round stores the objects, loads them again, and throws them away; stock and sealed take turns in being first.
Printed are the medians, and the median of the rounds' own ratios, which a noisy machine moves least.
"""

from __future__ import annotations

import argparse
import select
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager
from lmcache.v1.platform import consume_fd

from patches.lmcache_admission.room import allocate_with_room
from patches.lmcache_admission.tiers import make_resp, prepare, seal_tier

MODEL = "bench/model-kv1-0123456789ab"


class Side:
    """A tier and the objects that go through it."""

    def __init__(self, tier: Any, written: list[Any], read: list[Any]) -> None:
        self.tier, self.written, self.read = tier, written, read
        self.stored: list[float] = []
        self.loaded: list[float] = []

    def round(self, number: int) -> None:
        """Store, load and delete once, under keys of this round's own.

        Raises:
            RuntimeError: something was not stored or not loaded.
        """
        keys = [ObjectKey(number.to_bytes(16, "big") + place.to_bytes(16, "big"), MODEL, 0x01000000)
                for place in range(len(self.written))]  # fmt: skip
        size = sum(found.get_size() for found in self.written)
        tier = self.tier
        started = time.perf_counter()
        task = tier.submit_store_task(keys, self.written)
        done = answer(tier.get_store_event_fd(), lambda: tier.pop_completed_store_tasks().get(task))
        self.stored.append(size / (time.perf_counter() - started))
        started = time.perf_counter()
        task = tier.submit_load_task(keys, self.read)
        loaded = answer(tier.get_load_event_fd(), lambda: tier.query_load_result(task))
        self.loaded.append(size / (time.perf_counter() - started))
        if not done.is_successful() or len(loaded.get_indices_list()) != len(keys):
            raise RuntimeError("an object was not stored or not loaded")
        tier.delete(keys)


def answer(descriptor: int, ask: Callable[[], Any]) -> Any:
    """What ``ask`` says, once it says something; ``descriptor`` tells when to ask again."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while (found := ask()) is None:
        poller.poll(30_000)
        consume_fd(descriptor)
    return found


def configuration(kind: str, where: str, side: str, *, direct: bool) -> Any:
    """LMCache's configuration of the tier, a folder for each side."""
    spec: dict[str, Any] = {"type": kind}
    if kind == "resp":
        host, _, port = where.rpartition(":")
        spec |= {"host": host, "port": int(port)}
    else:
        spec |= {"base_path": str(Path(where) / side), "use_odirect": direct}
    return get_l2_adapter_config_class(kind).from_dict(spec)


def sides(kind: str, where: str, size: int, count: int, *, direct: bool) -> tuple[Side, Side]:
    """Stock and sealed, with random objects of ``size`` bytes (a multiple of 1024)."""
    manager = L1MemoryManager(
        L1MemoryManagerConfig(size_in_bytes=4 * count * (size + 8192) + (64 << 20), use_lazy=False)
    )
    layout = MemoryLayoutDesc([torch.Size([2, 8, 64, size // 1024])], [torch.uint8])
    made = []
    for side in ("stock", "sealed"):
        config = configuration(kind, where, side, direct=direct)
        allocate = L1MemoryManager.allocate
        objects = [
            (
                allocate(manager, layout, count)
                if side == "stock"
                else allocate_with_room(allocate, manager, layout, count)
            )[1]
            for _ in range(2)
        ]
        for found in objects[0]:
            found.raw_data.random_(0, 256)
        if side == "stock":
            tier = create_l2_adapter(config)
        else:
            prepare(kind, config)
            tier = seal_tier(kind, config, make_resp(config) if kind == "resp" else create_l2_adapter(config))
        made.append(Side(tier, *objects))
    return made[0], made[1]


def main() -> None:
    """Run the rounds and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("fs", "fs_native", "resp"))
    parser.add_argument("where", help="a folder, or host:port")
    parser.add_argument("--object-mib", type=float, default=4)
    parser.add_argument("--objects", type=int, default=32)
    parser.add_argument("--direct", action="store_true", help="past the page cache: as fast as the disk is")
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    stock, sealed = sides(asked.kind, asked.where, int(asked.object_mib * 2**20), asked.objects, direct=asked.direct)
    for number in range(asked.rounds):
        for side in (stock, sealed) if number % 2 else (sealed, stock):
            side.round(2 * number + (side is sealed))
    for name in ("stored", "loaded"):
        one, other = getattr(stock, name)[1:], getattr(sealed, name)[1:]
        ratio = statistics.median(new / old for old, new in zip(one, other, strict=True))
        print(
            f"{asked.kind} {name}: stock {statistics.median(one) / 1e9:.2f} GB/s, "
            f"sealed {statistics.median(other) / 1e9:.2f} GB/s, ratio {ratio:.3f}"
        )
    for side in (stock, sealed):
        side.tier.close()
        for found in side.written + side.read:
            found.ref_count_down()


if __name__ == "__main__":
    main()
