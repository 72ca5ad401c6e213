"""Bytes per second between an engine's worker and its LMCache server, with and without vllm-splint, in turns.

    python bench/lmcache_path.py messages --rounds 15
    python bench/lmcache_path.py shared_memory
    python bench/lmcache_path.py server_copies --chunks 16

Each side is a real ``lmcache server`` and a process with LMCache's own scheduler and worker adapters, as vLLM's
connector makes them, both with ``SPLINT_MODE=off`` or both with the patches. A round stores new chunks and loads them
into other blocks; what came back is compared with what was stored. The sides take turns in being first.
Printed are the medians, and the median of the rounds' own ratios, which a noisy machine moves least.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

CHUNK = 128
LAYERS = 8
BLOCK = (8, CHUNK, 256)
"""Heads, tokens, and elements of keys and values, two bytes each: 4 MiB a chunk over all layers."""
CHUNK_BYTES = LAYERS * 8 * CHUNK * 256 * 2
LIMIT_S = 60.0
MODES = {"messages": "engine_driven", "shared_memory": "engine_driven", "server_copies": "lmcache_driven"}
"""Ways of a chunk: pickled over the loopback, through the server's shared memory, or copied by the server."""
ANSWER = "driver:"


class Driver:
    """An engine's two ends of the connection to its LMCache server, and the blocks that go through it."""

    def __init__(self, mode: str, port: int, chunks: int) -> None:
        import torch
        import zmq
        from lmcache.integration.vllm import vllm_multi_process_adapter as adapters

        url, context, name = f"tcp://127.0.0.1:{port}", zmq.Context.instance(), "bench/model-kv1-0123456789ab"
        ranks = adapters.ParallelStrategy(
            mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1
        )
        extra = {"lmcache.mp.mp_transfer_mode": MODES[mode]}
        self.operation = adapters.LoadStoreOp
        self.chunks = chunks
        self.blocks = {
            f"layer.{number}": torch.rand(2 * chunks + 1, *BLOCK).to(torch.bfloat16) for number in range(LAYERS)
        }
        self.scheduler = adapters.LMCacheMPSchedulerAdapter([url], context, name, CHUNK, ranks, extra_config={})
        self.worker = adapters.LMCacheMPWorkerAdapter(url, context, name, CHUNK, ranks, extra_config=extra)
        self.worker.register_kv_caches(self.blocks, layout_hints={"kv_layout": "HND"})

    def round(self, number: int) -> tuple[float, float]:
        """Seconds that a store of all chunks took, and a load of them.

        Raises:
            RuntimeError: other bytes came back.
        """
        import torch

        first, count = number * self.chunks * CHUNK, self.chunks * CHUNK
        tokens, worker = list(range(first, first + count)), self.worker
        written, read = list(range(1, self.chunks + 1)), list(range(self.chunks + 1, 2 * self.chunks + 1))

        def send() -> None:
            worker.submit_store_request(
                f"store {number}", self.operation(tokens, [written], 0, count), worker.create_recorded_event()
            )
            wait(lambda: worker.get_finished(set()) and not worker.store_futures)

        def fetch() -> None:
            worker.submit_retrieve_request(
                request, self.operation(tokens, [read], 0, count), worker.create_recorded_event()
            )
            wait(lambda: request in (worker.get_finished(set())[1] or ()))

        stored = seconds(send)
        request = self._looked_up(number, tokens)
        loaded = seconds(fetch)
        for blocks in self.blocks.values():
            if not torch.equal(blocks[written], blocks[read]):
                raise RuntimeError("what came back is not what was stored")
            blocks[read] = 0
        return stored, loaded

    def _looked_up(self, number: int, tokens: list[int]) -> str:
        """The request under which the server has all tokens ready; it publishes a store after it has answered it."""
        asked: list[str] = []

        def known() -> bool:
            asked.append(f"load {number} {len(asked)}")
            self.scheduler.maybe_submit_lookup_request(asked[-1], tokens)
            found: list[int | None] = [None]

            def answered() -> bool:
                found[0] = self.scheduler.check_lookup_result(asked[-1])
                return found[0] is not None

            wait(answered)
            return found[0] == len(tokens)

        wait(known)
        return asked[-1]


def wait(true: Callable[[], Any]) -> None:
    """Ask until it is so.

    Raises:
        TimeoutError: it is not.
    """
    end = time.perf_counter() + LIMIT_S
    while not true():
        if time.perf_counter() > end:
            raise TimeoutError(f"not so after {LIMIT_S:g} s")
        time.sleep(0.0002)


def seconds(work: Callable[[], None]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def drive(mode: str, port: int, chunks: int) -> None:
    """Answer each number on standard input with the seconds of that round."""
    driver = Driver(mode, port, chunks)
    print(ANSWER, flush=True)
    for line in sys.stdin:
        print(ANSWER, *driver.round(int(line)), flush=True)
    driver.worker.shutdown()
    driver.scheduler.shutdown()
    os._exit(0)


class Side:
    """A server and a driver, with or without the patches."""

    def __init__(self, mode: str, chunks: int, rounds: int, *, patched: bool) -> None:
        environ = {**os.environ, "SPLINT_MODE": "enforce" if patched else "off", "OMP_NUM_THREADS": "1"}
        port, http = free_port(), free_port()
        room = 2.0 + CHUNK_BYTES * chunks * rounds / 2**30 * 1.2
        self.server = subprocess.Popen(
            [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port),
             "--http-host", "127.0.0.1", "--http-port", str(http), "--l1-size-gb", f"{room:.1f}", "--eviction-policy",
             "LRU", "--chunk-size", str(CHUNK), "--supported-transfer-mode", "auto",
             "--shm-name", f"splint_bench_{port}" if mode == "shared_memory" else ""],
            env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        wait(lambda: accepts(port))
        self.driver = subprocess.Popen(
            [sys.executable, __file__, mode, "--chunks", str(chunks), "--driver", str(port)],
            env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._line()
        self.stored: list[float] = []
        self.loaded: list[float] = []

    def _line(self) -> str:
        """The driver's next answer; log lines before it are left out."""
        if self.driver.stdout is None:
            raise RuntimeError("the driver has no output")
        for line in self.driver.stdout:
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER)
        raise RuntimeError(f"the driver ended with code {self.driver.wait()}")

    def round(self, number: int) -> None:
        """Store and load once."""
        print(number, file=self.driver.stdin, flush=True)
        stored, loaded = map(float, self._line().split())
        self.stored.append(stored)
        self.loaded.append(loaded)

    def end(self) -> None:
        """End both processes in order: their shared memory goes with them."""
        if self.driver.stdin is not None:
            self.driver.stdin.close()
        self.driver.wait(LIMIT_S)
        self.server.terminate()
        self.server.wait(LIMIT_S)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def accepts(port: int) -> bool:
    """Whether somebody listens on it."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    """Run the rounds and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--chunks", type=int, default=16, help="of 4 MiB, a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--driver", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.driver is not None:
        drive(asked.mode, asked.driver, asked.chunks)
    sides: list[Side] = []
    try:
        sides.append(Side(asked.mode, asked.chunks, asked.rounds + 1, patched=False))
        sides.append(Side(asked.mode, asked.chunks, asked.rounds + 1, patched=True))
        for number in range(asked.rounds + 1):  # the first one touches the server's memory for the first time
            for side in sides if number % 2 else reversed(sides):
                side.round(number)
    finally:
        for side in sides:
            side.end()
    stock, patched_side = sides
    size = CHUNK_BYTES * asked.chunks
    for name in ("stored", "loaded"):
        one, other = getattr(stock, name)[1:], getattr(patched_side, name)[1:]
        ratio = statistics.median(old / new for old, new in zip(one, other, strict=True))
        print(
            f"{asked.mode} {name}: stock {size / statistics.median(one) / 1e9:.2f} GB/s, "
            f"patched {size / statistics.median(other) / 1e9:.2f} GB/s, ratio {ratio:.3f}"
        )


if __name__ == "__main__":
    main()
