"""Known bytes through the engine's real KV tensors and its real connector: written, stored, wiped, loaded, compared."""

from __future__ import annotations

import random
import time
from typing import Any

from patches.framework.errors import ProbeError
from patches.kv_probe import lmcache
from patches.kv_probe.blocks import Groups, borrowed, spans
from patches.kv_probe.lmcache import Transfer

__all__ = ["round_trip", "state"]

BLOCKS = 2
CHUNKS = 2
TRANSFER_S = 10.0
_TOKENS = 2**15


def round_trip(engine: Any) -> dict[str, Any]:
    """Write, read back, and where LMCache is the connector store, wipe, load into other positions and compare.

    Args:
        engine: vLLM's ``EngineCore``, between two steps and without requests.

    Returns:
        ``workers`` with sizes and differing bytes by layer, ``connector`` with what was moved or why nothing was.

    Raises:
        ProbeError: blocks are short, or a transfer failed.
    """
    sizes = spans(engine.scheduler.kv_cache_config)
    if not any(sizes):
        return {"skipped": "the engine keeps no KV cache", "state": _workers(engine, "connector")}
    connector, reason = _connector(engine)
    tokens = CHUNKS * connector.scheduler_adapter.lmcache_tokens_per_chunk if connector else 0
    counts = [(tokens // size if tokens else BLOCKS) if size else 0 for size in sizes]
    seed = random.SystemRandom().getrandbits(32)
    with borrowed(engine, counts, lambda groups: _wipe(engine, groups)) as groups:
        found = {"workers": _workers(engine, "write", groups=groups, seed=seed)}
        if connector is None:
            return {**found, "connector": {"skipped": reason}}
        return {**found, "connector": _through(engine, connector, groups, tokens, seed)}


def state(engine: Any) -> dict[str, Any]:
    """Health of LMCache's connector in the scheduler and in every worker.

    Args:
        engine: vLLM's ``EngineCore``, between two steps.
    """
    connector = engine.scheduler.connector
    return {
        "scheduler": lmcache.scheduler_state(connector),
        "workers": _workers(engine, "connector"),
    }


def _connector(engine: Any) -> tuple[Any, str]:
    """LMCache's connector that both stores and loads, or None and the reason why there is none."""
    transfer = engine.vllm_config.kv_transfer_config
    if engine.scheduler.connector is None or transfer is None:
        return None, "no KV connector is configured"
    found = lmcache.find(engine.scheduler.connector)
    if found is None:
        return None, f"{transfer.kv_connector} is not {lmcache.NAME}: there is no way to move single blocks through it"
    if transfer.kv_role != "kv_both":
        return None, f"the role {transfer.kv_role} does not both store and load"
    return found, ""


def _workers(engine: Any, step: str, **arguments: Any) -> list[Any]:
    found: list[Any] = engine.model_executor.collective_rpc("splint_probe", args=(step, arguments))
    return found


def _wipe(engine: Any, groups: Groups) -> None:
    _workers(engine, "wipe", groups=groups)


def _through(engine: Any, connector: Any, groups: Groups, tokens: int, seed: int) -> dict[str, Any]:
    """Store from the blocks, wipe them, load into them in reverse order, and compare."""
    source = random.SystemRandom()
    name = f"splint-probe-{source.getrandbits(64):016x}"
    ids = [source.randrange(_TOKENS) for _ in range(tokens)]
    stored, loaded = Transfer(f"{name}-store", ids, name), Transfer(f"{name}-load", ids, name)
    start = time.monotonic()
    try:
        _workers(engine, "store", groups=groups, **stored.arguments())
        lmcache.wait_for(engine, stored, "store", start + TRANSFER_S)
        _wipe(engine, groups)
        _found(connector, loaded, start + TRANSFER_S)
        turned = [list(reversed(group)) for group in groups]
        _workers(engine, "load", groups=turned, **loaded.arguments())
        lmcache.wait_for(engine, loaded, "load", start + TRANSFER_S)
        compared = _workers(engine, "compare", groups=turned, seed=seed)
    finally:
        lmcache.finish(connector, stored)
        lmcache.finish(connector, loaded)
    return {"name": lmcache.NAME, "tokens": tokens, "seconds": round(time.monotonic() - start, 3), "workers": compared}


def _found(connector: Any, transfer: Transfer, deadline: float) -> None:
    """Look the tokens up until LMCache has published all of them.

    Raises:
        ProbeError: it never does.
    """
    found = 0
    while time.monotonic() < deadline:
        found = lmcache.lookup(connector, transfer, deadline)
        if found == len(transfer.tokens):
            return
        lmcache.finish(connector, transfer)
        time.sleep(lmcache.POLL_S)
    raise ProbeError(
        f"{found} of {len(transfer.tokens)} tokens in LMCache after they were stored",
        "all of them",
        "Look in the log of lmcache server: it has dropped them, or is too small (--l1-size-gb).",
    )
