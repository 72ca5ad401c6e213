"""A socket that says nothing: whoever is connected to it sees the end of this process, also after SIGKILL."""

from __future__ import annotations

import logging
import socket
import threading

__all__ = ["Lifeline", "address_towards", "hold"]

logger = logging.getLogger("vllm.splint.kv_budget")

CONNECT_S = 10.0
# A host that is gone can't close its connections: after about 11 s without an answer the kernel says so.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))


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
        self._listener = socket.create_server((address, 0), family=family)
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


def hold(place: tuple[str, int]) -> bool:
    """Wait until the process behind ``place`` has ended or closed its line. False where it could not be reached."""
    try:
        connection = socket.create_connection(place, timeout=CONNECT_S)
    except ConnectionRefusedError:
        return True
    except OSError as error:
        logger.warning("KV budget: no connection to %s port %d (%s): its death would not be noticed.", *place, error)
        return False
    with connection:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
        try:
            connection.recv(1)
        except OSError:
            logger.debug("the line to %s broke", place)
    return True
