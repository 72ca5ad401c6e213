"""A socket that says nothing: whoever is connected to it sees the end of this process, also after SIGKILL.

A host that is gone can't close its connections. The kernel asks every other end by TCP keepalive, and says so after
:data:`SILENT_S` seconds without an answer.
"""

from __future__ import annotations

import logging
import socket
import threading
from enum import Enum

__all__ = ["SILENT_S", "Lifeline", "Line", "address_towards", "hold"]

logger = logging.getLogger("vllm.splint.kv_budget")

CONNECT_S = 10.0
BACKLOG = 4096
"""Every rank connects to DP0, at about the same time."""
IDLE_S = 5
INTERVAL_S = 2
PROBES = 3
SILENT_S = IDLE_S + INTERVAL_S * PROBES
"""Seconds after which a host that no longer answers is given up."""


class Line(Enum):
    """What became of a line that was held."""

    ENDED = "its process closed it, or ended"
    SILENT = "its host no longer answers"
    UNREACHED = "it could not be reached"


def address_towards(host: str) -> str:
    """The address of this host from which ``host`` is reached; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class Lifeline:
    """This process's end of the line, from its making to :meth:`close`.

    Args:
        address: Where to listen; the port is the system's choice.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self._held: list[socket.socket] = []
        self.place: tuple[str, int] = (address, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="splint-kv-lifeline", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self._held.append(self._listener.accept()[0])
            except OSError:  # closed
                return

    def close(self) -> None:
        """Let go. Who is connected must know by then that this is no death."""
        for end in (self._listener, *self._held):
            end.close()


def hold(place: tuple[str, int]) -> Line:
    """Wait until the process behind ``place`` has ended or closed its line, or its host is silent."""
    try:
        connection = socket.create_connection(place, timeout=CONNECT_S)
    except ConnectionRefusedError:
        return Line.ENDED
    except OSError as error:
        logger.warning("KV budget: no connection to %s port %d (%s): its death would not be noticed.", *place, error)
        return Line.UNREACHED
    with connection:
        connection.settimeout(None)
        _keep_alive(connection)
        try:
            connection.recv(1)
        except ConnectionError:  # reset: the host is there, the process is not
            return Line.ENDED
        except OSError as error:
            logger.debug("the line to %s broke: %s", place, error)
            return Line.SILENT
    return Line.ENDED


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
