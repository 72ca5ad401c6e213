"""At start: an absent or wrongly started server is found in seconds, with the command that starts it right."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from patches.framework import process
from patches.framework.errors import EnvironmentRefusedError, RefusedError
from patches.framework.records import Seam
from patches.lmcache_admission import refused
from patches.lmcache_availability.connection import link_of, unlimited
from patches.lmcache_availability.limits import start_limit_s
from patches.lmcache_availability.link import Link
from patches.lmcache_availability.protection import ask_again, require

__all__ = [
    "get_lmcache_chunk_size",
    "scheduler_adapter",
    "server_command",
    "submit_registration",
    "worker_adapter",
]

USUAL_CHUNK_TOKENS = 256
RETRY_S = 0.2
UNBOUNDED = ("grpc://", "grpc+unix://")
"""Transports whose clients tell nobody that a server is gone, and whose requests have no limit of their own."""

ORDER_GRACE_S = 0.5
REGISTRATION_LIMIT_S = 300.0


def server_command(url: str, block_tokens: int) -> str:
    """The ``lmcache server`` command line that suits an engine.

    Args:
        url: The server's address as the connector has it, ``tcp://host:port``.
        block_tokens: The engine's block size, in tokens; the chunk size becomes a multiple of it.
    """
    host, _, port = url.rpartition("://")[2].rpartition(":")
    chunk_tokens = block_tokens * max(1, USUAL_CHUNK_TOKENS // block_tokens)
    return (
        f"lmcache server --host {host} --port {port} --chunk-size {chunk_tokens} --l1-size-gb <GB>"
        " --eviction-policy LRU --supported-transfer-mode auto"
    )


def _remedy(url: str, block_tokens: int) -> str:
    return f"Start the server with: {server_command(url, block_tokens)}"


def _silent(url: str, block_tokens: int) -> RefusedError:
    return EnvironmentRefusedError(
        f"no LMCache server answered at {url} within {start_limit_s():g} s",
        "a running one (lmcache.mp.host and lmcache.mp.port of --kv-transfer-config name its address)",
        f"{_remedy(url, block_tokens)} (or give it longer with SPLINT_LMCACHE_START_TIMEOUT_S).",
    )


def _wrong_chunks(url: str, block_tokens: int, chunk_tokens: int) -> RefusedError:
    return EnvironmentRefusedError(
        f"the LMCache server at {url} has chunk size {chunk_tokens}",
        f"a multiple of the engine's block size, {block_tokens} tokens",
        f"{_remedy(url, block_tokens)}",
    )


def _not_registered(link: Link, reason: str) -> RefusedError:
    """LMCache's protocol carries no reason; a server of ours says it in its attestation."""
    found = f"the LMCache server at {link.url} answers, but not to the registration of this engine's KV cache"
    if reason:
        return EnvironmentRefusedError(
            f"{found}; the last one that it refused was {reason}",
            "a server that takes it",
            "Change what it names, or start an LMCache server for this engine alone.",
        )
    return EnvironmentRefusedError(
        found,
        "a server that supports this engine's transfer mode, has no lossy serde for one-byte KV and no other layout"
        " under this engine's name",
        f"{_remedy(link.url, link.block_tokens)} (if it was started so, its log says why it refused the registration).",
    )


def _unbounded(url: str) -> RefusedError:
    return EnvironmentRefusedError(
        f"the LMCache server at {url} over gRPC",
        "ZMQ (tcp://host:port): over gRPC a look-up on a paused or dead server waited 8 to 11 s, and nothing tells that"
        " a server is gone",
        "Start the server with --transport zmq (its default) and name it with tcp:// in --kv-transfer-config"
        " (lmcache.mp.host, or lmcache.mp.server_urls).",
    )


def get_lmcache_chunk_size(seam: Seam) -> Callable[..., Any]:
    """Ask until the start limit: the server may be starting at this moment, or a proxy may stand in its place."""
    ask = seam.original

    @wraps(ask)
    def patient(req_client: Any, timeout: float = float("inf")) -> int:
        seam.count()
        link = link_of(req_client)
        deadline = time.monotonic() + min(timeout, start_limit_s())
        while link.chunk_tokens is None:
            link.chunk_tokens = _asked(ask, req_client, deadline)
        link.answered()
        if (current := process.current()) is not None:
            current.note(lmcache_chunk_tokens=link.chunk_tokens)
        return link.chunk_tokens

    return patient


def _asked(ask: Callable[..., int], req_client: Any, deadline: float) -> int | None:
    """The server's chunk size in tokens, or None: ask again. Raises TimeoutError at the deadline."""
    try:
        return ask(req_client, max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        if time.monotonic() + RETRY_S > deadline:
            raise
        time.sleep(RETRY_S)
        return None


def scheduler_adapter(seam: Seam) -> Callable[..., Any]:
    """The scheduler's side of the connector, refused where a server does not suit it."""
    return _adapter(seam, lambda adapter, given: getattr(adapter, "req_clients", {}))


def worker_adapter(seam: Seam) -> Callable[..., Any]:
    """The worker's side of the connector, refused where its server does not suit it."""

    def clients(adapter: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {given["server_url"]: adapter.req_client} if hasattr(adapter, "req_client") else {}

    return _adapter(seam, clients)


def _adapter(seam: Seam, clients: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Callable[..., Any]:
    original = seam.original
    signature = inspect.signature(original)

    @wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        seam.count()
        given = signature.bind(self, *args, **kwargs).arguments
        for url in given.get("server_urls") or [given["server_url"]]:
            if url.strip().lower().startswith(UNBOUNDED):
                process.refuse(_unbounded(url))
        block_tokens: int = given.get("legacy_block_size") or given["vllm_block_size"]
        try:
            original(self, *args, **kwargs)
        except (ConnectionError, TimeoutError, ValueError) as error:
            unfit = _unfit(_links(clients(self, given), block_tokens))
            if unfit is not None:
                process.refuse(unfit)
            raise error from None
        named = clients(self, given)
        for link, client in zip(_links(named, block_tokens), named.values(), strict=True):
            require(client, link)

    return start


def _links(clients: dict[str, Any], block_tokens: int) -> list[Link]:
    """The clients' links, with what messages need to say about them."""
    links = []
    for url, client in clients.items():
        link = link_of(client)
        link.url, link.block_tokens = url, block_tokens
        links.append(link)
    return links


def _unfit(links: list[Link]) -> RefusedError | None:
    """What is wrong with the first server that does not suit the engine, or None where the fault is elsewhere."""
    for link in links:
        if link.chunk_tokens is None:
            return _silent(link.url, link.block_tokens)
        if link.chunk_tokens % link.block_tokens:
            return _wrong_chunks(link.url, link.block_tokens, link.chunk_tokens)
    return None


def _mode(transfer: Any) -> str:
    """Who copies between a worker and its LMCache server, by LMCache's name for it."""
    from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext
    from lmcache.v1.multiprocess.transfer_mode import MPTransferMode

    driven_by_engine = isinstance(transfer, EngineDrivenTransferContext)
    mode = MPTransferMode.ENGINE_DRIVEN if driven_by_engine else MPTransferMode.LMCACHE_DRIVEN
    return str(mode.value)


def _refused_by(link: Link) -> tuple[int, str]:
    """Registrations that the server had refused when it was last asked who it is, and why the last one."""
    return refused.said((link.server or {}).get("facts", {}))


def submit_registration(seam: Seam) -> Callable[..., Any]:
    """Tell a server that will never answer a registration from one that is busy with it.

    The server handles registrations and the question for its chunk size in one thread, in order. So an answer to the
    question that was sent *after* a registration says that the registration's own answer is not coming.
    """
    original = seam.original

    @wraps(original)
    def submit(self: Any, send: Callable[[], Any]) -> Any:
        seam.count()
        if (current := process.current()) is not None:
            current.note(lmcache_transfer=_mode(self))
        link = link_of(self._req_client)
        before, _ = _refused_by(link)
        registration = original(self, send)
        question = unlimited(self._req_client.get_chunk_size())
        if question.wait(REGISTRATION_LIMIT_S) and not registration.wait(ORDER_GRACE_S):
            ask_again(self._req_client, link)
            count, reason = _refused_by(link)
            process.refuse(_not_registered(link, reason if count > before else ""))
        return registration

    return submit
