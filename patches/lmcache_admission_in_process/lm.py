"""``lm://``: one exchange under one lock; a connection that is out of step is replaced.

Stock gives the lock away between an answer's header and its body: two look-ups at a time, and one takes the other's
header for KV. Where memory is short it leaves the body in the connection, and the next answer begins with it.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework.records import Seam

__all__ = ["exists", "get", "put"]

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
_SKIP_BYTES = 1 << 20


def get(seam: Seam) -> Callable[..., Any]:
    """Ask, and read the whole answer before anybody else may ask."""

    @wraps(seam.original)
    async def got(self: Any, key: Any) -> Any:
        seam.count()
        async with self.async_socket_lock:
            return _in_step(self, lambda: _exchange_get(self, key))

    return got


def exists(seam: Seam) -> Callable[..., Any]:
    """Ask, and read the whole answer: stock takes as much of it as has come."""

    @wraps(seam.original)
    async def there(self: Any, key: Any) -> bool:
        seam.count()
        async with self.async_socket_lock:
            return bool(_in_step(self, lambda: _ask(self, "EXIST", key)))

    return there


def put(seam: Seam) -> Callable[..., Any]:
    """Send header and body, or replace the connection: half a body would swallow the next request."""

    @wraps(seam.original)
    async def sent(self: Any, key: Any, memory_obj: Any) -> None:
        seam.count()
        header = _message("PUT", key, memory_obj)
        async with self.async_socket_lock:
            _in_step(self, lambda: _send(self, header, memory_obj.byte_array))

    return sent


def _in_step(connector: Any, exchange: Callable[[], Any]) -> Any:
    """Do one exchange; on any trouble the connection is dropped, and the next exchange opens a new one.

    Raises:
        OSError: the server can't be reached, or the exchange broke off.
    """
    if connector.client_socket.fileno() < 0:
        connector.client_socket = socket.create_connection(connector.splint_address, timeout=ANSWER_S)
    elif "splint_address" not in vars(connector):
        connector.splint_address = connector.client_socket.getpeername()
        connector.client_socket.settimeout(ANSWER_S)
    try:
        return exchange()
    except BaseException:
        connector.client_socket.close()
        raise


def _send(connector: Any, *parts: Any) -> None:
    for part in parts:
        connector.client_socket.sendall(part)


def _exchange_get(connector: Any, key: Any) -> Any:
    answer = _ask(connector, "GET", key)
    if answer is None:
        return None
    found = connector.local_cpu_backend.allocate(answer.shape, answer.dtype, answer.fmt)
    target = None if found is None else memoryview(found.byte_array).cast("B")
    if target is None or len(target) != answer.length:
        _read_away(connector, answer.length)
        return None if found is None else found.ref_count_down()
    _read(connector, target)
    return found


def _ask(connector: Any, command: str, key: Any) -> Any:
    """The server's header, or None where it does not have the key."""
    from lmcache.v1.protocol import ServerMetaMessage, ServerReturnCode

    _send(connector, _message(command, key))
    header = memoryview(bytearray(ServerMetaMessage.packlength()))
    _read(connector, header)
    answer = ServerMetaMessage.deserialize(header)
    return answer if answer.code == ServerReturnCode.SUCCESS else None


def _message(command: str, key: Any, memory_obj: Any = None) -> bytes:
    """A request's header; without an object, with LMCache's own filler in its place."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.protocol import ClientCommand, ClientMetaMessage

    about = (0, MemoryFormat(1), torch.float16, torch.Size([0, 0, 0, 0]))
    if memory_obj is not None:
        form, dtype, shape = memory_obj.get_memory_format(), memory_obj.get_dtype(), memory_obj.get_shape()
        about = (len(memory_obj.byte_array), form, dtype, shape)
    return ClientMetaMessage(ClientCommand[command], key, *about).serialize()  # type: ignore[no-any-return]


def _read(connector: Any, target: memoryview) -> None:
    while target:
        count = connector.client_socket.recv_into(target)
        if not count:
            raise ConnectionResetError("the lm:// server closed the connection")
        target = target[count:]


def _read_away(connector: Any, size: int) -> None:
    waste = memoryview(bytearray(min(size, _SKIP_BYTES)))
    while size > 0:
        _read(connector, waste[: min(size, len(waste))])
        size -= min(size, len(waste))
