"""Engines of other nodes: whether the connections through which this API server reaches them still stand."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from patches.serving_gate.expected import local_dp_ranks

__all__ = ["LOST_WITHIN_S", "Peers", "peers_of", "remote_dp_ranks"]

# A host that is gone can't close its connections: the kernel asks after 3 s of silence, twice, 2 s apart.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 2))
LOST_WITHIN_S = 3 + 2 * 2 + 1
_ESTABLISHED = 1


def remote_dp_ranks(config: Any) -> tuple[int, ...]:
    """Data-parallel ranks that this API server sends requests to and that run on other nodes.

    Args:
        config: vLLM's ``VllmConfig``. With elastic expert parallelism ranks come and go: none is named.
    """
    parallel = config.parallel_config
    if parallel.local_engines_only or parallel.enable_elastic_ep or parallel.data_parallel_backend != "mp":
        return ()
    return tuple(sorted(set(range(parallel.data_parallel_size)) - set(local_dp_ranks(parallel))))


@dataclass(frozen=True)
class Peers:
    """The TCP connections on which engines take their requests from this process.

    Attributes:
        lines: Address of the far end, and a descriptor of our own for the same connection: its end can be seen there.
        ranks: The ranks of other nodes among those at the far ends.
    """

    lines: tuple[tuple[str, socket.socket], ...]
    ranks: tuple[int, ...]

    @classmethod
    def on(cls, endpoint: str, ranks: tuple[int, ...]) -> Peers:
        """Those that are connected to ``endpoint``, such as ``tcp://10.0.0.1:41234``."""
        return cls(tuple(_connections(int(endpoint.rpartition(":")[2]))), ranks)

    def look(self) -> str | None:
        """Whose connection has ended, or None. One system call a connection."""
        lost = sorted({address for address, line in self.lines if _has_ended(line)})
        if not lost:
            return None
        ranks = ", ".join(f"DP{rank}" for rank in self.ranks)
        return f"lost the connection to an engine at {', '.join(lost)}; ranks on other nodes: {ranks}"


def peers_of(engine: Any) -> Peers | None:
    """The peers of ``engine``, vLLM's ``AsyncLLM``; None where all its engines run on this node."""
    ranks = remote_dp_ranks(engine.vllm_config)
    if not ranks:
        return None
    endpoint: bytes = engine.engine_core.input_socket.last_endpoint
    return Peers.on(endpoint.rstrip(b"\0").decode(), ranks)


def _connections(port: int) -> Iterator[tuple[str, socket.socket]]:
    """This process's accepted connections on ``port``, each with a copied descriptor and keep-alive turned on."""
    for number in _sockets():
        try:
            line = socket.socket(fileno=os.dup(number))
        except OSError:  # closed meanwhile
            continue
        address = _far_end(line, port)
        if address is None:
            line.close()
        else:
            _keep_alive(line)
            yield address, line


def _sockets() -> list[int]:
    """One descriptor for each socket of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found[os.readlink(f"/proc/self/fd/{name}")] = int(name)
    return [number for target, number in found.items() if target.startswith("socket:")]


def _far_end(line: socket.socket, port: int) -> str | None:
    """The address at the far end of a TCP connection whose near end is ``port``; None for any other socket."""
    if line.family not in (socket.AF_INET, socket.AF_INET6) or line.type != socket.SOCK_STREAM:
        return None
    try:
        address: str = line.getpeername()[0]
    except OSError:  # it listens
        return None
    return address if line.getsockname()[1] == port else None


def _keep_alive(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        line.setsockopt(socket.IPPROTO_TCP, option, value)


def _has_ended(line: socket.socket) -> bool:
    """Whether the connection is no longer established: the first byte of Linux's ``struct tcp_info`` is its state."""
    return line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED
