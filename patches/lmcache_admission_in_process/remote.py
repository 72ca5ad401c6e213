"""Remote tiers of the in-process connector: sealed where they can be, else refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any

from patches.framework import process
from patches.framework.errors import EnvironmentRefusedError
from patches.framework.records import Seam
from patches.lmcache_admission.seal import check_speed
from patches.lmcache_admission.serdes import EXACT_IN_PROCESS, check_in_process
from patches.lmcache_admission.unprotected import require_acceptance

__all__ = ["create_backends", "create_connector", "create_serde", "redis_client"]

SEALED = {"FSConnector": "fs", "RedisConnector": "redis", "RESPConnector": "resp", "LMCServerConnector": "lm"}
"""LMCache's class of the connector, and the tier's name in counters."""


BACKENDS = ("local_disk", *SEALED.values())
_refused: ContextVar[list[EnvironmentRefusedError] | None] = ContextVar("refused", default=None)
"""What was refused while LMCache makes its backends: its loader of ``remote_storage_plugins`` only logs exceptions."""


def create_backends(seam: Seam) -> Callable[..., Any]:
    """Backends that are no remote tiers and have code of their own carry no seals: refused, or accepted by name."""
    original = seam.original

    @wraps(original)
    def created(config: Any, *args: Any, **kwargs: Any) -> Any:
        seam.count()
        for name in _bare(config):
            require_acceptance(name, BACKENDS, "the storage backend")
        refused: list[EnvironmentRefusedError] = []
        token = _refused.set(refused)
        try:
            made = original(config, *args, **kwargs)
        finally:
            _refused.reset(token)
        if refused:
            raise refused[0]
        return made

    return created


def _note(error: EnvironmentRefusedError) -> None:
    noted = _refused.get()
    if noted is not None:
        noted.append(error)


def _bare(config: Any) -> Iterator[str]:
    """LMCache's names of the configured backends that move or keep bare bytes."""
    extra = config.extra_config or {}
    asked = {
        "pd": config.enable_pd,
        "p2p": config.enable_p2p,
        "nixl_storage": extra.get("enable_nixl_storage"),
        "gds": config.gds_path,
        "maru": config.maru_path,
    }
    yield from (name for name, given in asked.items() if given)
    yield from config.storage_plugins or ()


def _refuse(error: EnvironmentRefusedError) -> None:
    try:
        process.refuse(error)
    except EnvironmentRefusedError:
        _note(error)
        raise


def create_connector(seam: Seam) -> Callable[..., Any]:
    """Put the checks between LMCache and the connector."""
    original = seam.original

    @wraps(original)
    def created(url: str, loop: Any, local_cpu_backend: Any, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        seam.count()
        made = original(url, loop, local_cpu_backend, config, *args, **kwargs)
        try:
            _check(made, url.partition("://")[0], config)
        except EnvironmentRefusedError as error:
            _note(error)
            raise _irrecoverable(error) from error
        return made

    return created


def _check(made: Any, scheme: str, config: Any) -> None:
    """Put the checks in, or ask for the operator's acceptance."""
    from patches.lmcache_admission_in_process.connector import CheckedConnector

    inner = made.getWrappedConnector()
    name = type(inner).__name__
    if name not in SEALED:
        require_acceptance(scheme, SEALED.values(), "the remote tier")
    elif config is not None and config.remote_serde not in EXACT_IN_PROCESS:
        require_acceptance(config.remote_serde, EXACT_IN_PROCESS, "the serde")
    elif inner.local_cpu_backend is not None:
        check_speed()
        made._connector = CheckedConnector(inner, SEALED[name], layerwise=bool(config and config.use_layerwise))


def _irrecoverable(error: EnvironmentRefusedError) -> Exception:
    """LMCache takes any other exception of a connector for a server that is away, and goes on without it."""
    from lmcache.v1.exceptions import IrrecoverableException

    return IrrecoverableException(str(error))  # type: ignore[no-any-return]


def create_serde(seam: Seam) -> Callable[..., Any]:
    """A lossy serde of the remote tier with one-byte KV refuses the start."""
    original = seam.original

    @wraps(original)
    def created(serde_type: str, metadata: Any, config: Any) -> Any:
        seam.count()
        try:
            check_in_process(serde_type, metadata.kv_dtype)
        except EnvironmentRefusedError as error:
            _refuse(error)
        return original(serde_type, metadata, config)

    return created


def redis_client(seam: Seam) -> type:
    """The client that keeps its step, for ``resp://``."""
    from patches.lmcache_admission.resp_client import RespClient

    return RespClient
