"""Add up whole numbers over processes and compare with the exact sums: ``allreduce <nccl|gloo> <processes>``.

torch is imported once, before the processes are forked: that is what takes long.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path

from patches.supervision.processes import die_with_parent

COUNT = 1 << 16
"""Elements: enough for several chunks of a ring, little enough to take no time."""


def _rank(backend: str, rank: int, world: int, store: str) -> bool:
    """Whether this rank got the exact sums."""
    import torch
    from torch import distributed

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    numbers = torch.arange(COUNT, dtype=torch.int64)
    added = (numbers * (rank + 1)).to(device)
    distributed.all_reduce(added)
    exact = bool(torch.equal(added.cpu(), numbers * (world * (world + 1) // 2)))
    distributed.destroy_process_group()
    return exact


def _start(backend: str, rank: int, world: int, store: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 2
    try:
        die_with_parent(signal.SIGKILL)
        code = 0 if _rank(backend, rank, world, store) else 1
    except Exception:  # noqa: BLE001 - whatever it is, the parent gets a code and the log the trace
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _codes(pids: list[int]) -> list[int] | None:
    """Each rank's exit code; None as soon as one broke, which leaves the others waiting for it."""
    codes = dict.fromkeys(pids, 0)
    for _ in pids:
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] not in (0, 1):
            return None
    return list(codes.values())


def main() -> int:
    """Run, and print what came out."""
    die_with_parent(signal.SIGKILL)
    backend, world = sys.argv[1], int(sys.argv[2])
    import_module("torch.distributed")  # once for all ranks
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        codes = _codes([_start(backend, rank, world, store) for rank in range(world)])
    if codes is None:
        return 1
    wrong = [rank for rank, code in enumerate(codes) if code]
    seconds = round(time.perf_counter() - start, 3)
    print(json.dumps({"backend": backend, "processes": world, "wrong": wrong, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
