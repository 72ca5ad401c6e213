"""The storage of LMCache's in-process connector, without an engine: its own backends on CPU memory."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.servers import free_port

__all__ = ["CHUNK", "LmClient", "Store", "lm_server", "name"]

CHUNK = 16
LAYERS = 2
HEADS = 2
HEAD_DIM = 32


def name(number: int, dtype: str = "uint8", *, model: str = "Org/model-kv1-0123456789ab") -> Any:
    """LMCache's key of an object."""
    import torch
    from lmcache.utils import CacheEngineKey

    return CacheEngineKey(model, 1, 0, number, getattr(torch, dtype))


class Store:
    """One engine's memory, and an event loop in a thread as LMCache has it."""

    def __init__(self, dtype: str = "uint8", head_dim: int = HEAD_DIM, **settings: Any) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.pin_monitor import PinMonitor
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, local_cpu=False, max_local_cpu_size=0.05, **settings
        )
        shape = (LAYERS, 2, CHUNK, HEADS, head_dim)
        self.metadata = LMCacheMetadata(
            "Org/model-kv1-0123456789ab", 1, 1, 0, 0, getattr(torch, dtype), shape, chunk_size=CHUNK
        )
        self.dtype = dtype
        PinMonitor.GetOrCreate(self.config)
        self.memory = LocalCPUBackend(self.config, self.metadata, dst_device="cpu")
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, task: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(task, self.loop).result(20)

    def connector(self, url: str) -> Any:
        from lmcache.v1.storage_backend.connector import CreateConnector

        return CreateConnector(url, self.loop, self.memory, self.config, self.metadata)

    def remote(self) -> Any:
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        return RemoteBackend(self.config, self.metadata, self.loop, self.memory, dst_device="cpu")

    def disk(self) -> Any:
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        return LocalDiskBackend(self.config, self.loop, self.memory, dst_device="cpu", metadata=self.metadata)

    def random(self, seed: int = 0) -> Any:
        """An object of random bytes."""
        import torch

        found = self.memory.allocate(self.metadata.get_shapes(), self.metadata.get_dtypes())
        found.raw_data[: found.get_size()].random_(0, 256, generator=torch.Generator().manual_seed(seed))
        return found

    def close(self) -> None:
        self.run(_end_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()
        self.memory.memory_allocator.close()


async def _end_tasks() -> None:
    """LMCache leaves its executors' tasks waiting; collected after their loop is closed, they fail some later test."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=5)


@contextmanager
def lm_server(folder: Path) -> Iterator[int]:
    """LMCache's own ``lm://`` server; yields its port."""
    port = free_port()
    with (folder / "lm.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 240
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if time.monotonic() > deadline or process.poll() is not None:
                raise TimeoutError((folder / "lm.log").read_text()[-2000:])
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait(60)


class LmClient:
    """Puts and gets any bytes under a key of an ``lm://`` server, with whatever header."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("lm://").partition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        self._headers: dict[str, Any] = {}

    def close(self) -> None:
        self._socket.close()

    def put(self, key: str, content: bytes, **header: Any) -> None:
        """Store ``content`` under the header that :meth:`get` has found there, but for the parts in ``header``.

        Returns when it is stored: a put has no answer, so something is asked behind it.
        """
        about = {part: getattr(self._headers[key], part) for part in ("fmt", "dtype", "shape")} | header
        self._send("PUT", key, len(content), about, content)
        self._ask("EXIST", key)

    def get(self, key: str) -> bytes:
        self._headers[key] = self._ask("GET", key)
        return self._receive(self._headers[key].length)

    def _ask(self, command: str, key: str) -> Any:
        import torch
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.protocol import ServerMetaMessage

        self._send(command, key, 0, {"fmt": MemoryFormat(1), "dtype": torch.float16, "shape": torch.Size([0, 0, 0, 0])})
        return ServerMetaMessage.deserialize(self._receive(ServerMetaMessage.packlength()))

    def _send(self, command: str, key: str, length: int, about: dict[str, Any], content: bytes = b"") -> None:
        from lmcache.utils import parse_cache_key
        from lmcache.v1.protocol import ClientCommand, ClientMetaMessage

        message = ClientMetaMessage(ClientCommand[command], parse_cache_key(key), length, **about)
        self._socket.sendall(message.serialize() + content)

    def _receive(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            received += self._socket.recv(size - len(received)) or self._broken()
        return bytes(received)

    def _broken(self) -> bytes:
        raise ConnectionResetError("the lm:// server closed the connection")
