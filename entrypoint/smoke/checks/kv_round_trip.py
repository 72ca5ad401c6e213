"""Bytes in the engine's own KV tensors come back as they were written, through the connector too."""

from __future__ import annotations

from typing import Any

from entrypoint.smoke import probing
from entrypoint.smoke.check import Check, CheckFailedError, Context, DoesNotApplyError, Evidence
from entrypoint.smoke.probing import where

__all__ = ["CHECK", "judge"]

_ALIASED = "Layers share memory or their views are wrong: do not serve, and report it with the engine's arguments."
_CHANGED = "The connector gives back other bytes than it was given: do not serve, keep the logs of lmcache server."


def judge(engines: list[dict[str, Any]]) -> Evidence:
    """Evidence of a sound round trip on every worker of every engine.

    Raises:
        CheckFailedError: bytes differ, a token has another size than the profile says, or nothing was written.
        DoesNotApplyError: no engine keeps a KV cache.
    """
    if all("skipped" in engine for engine in engines):
        raise DoesNotApplyError(engines[0]["skipped"])
    for engine in engines:
        _written(engine)
        for worker in engine["workers"]:
            _same(engine, worker, "written and read back", _ALIASED)
            _sized(engine, worker)
        for worker in engine["connector"].get("workers", ()):
            _same(engine, worker, "stored, wiped and loaded through the connector", _CHANGED)
    return {"engines": engines}


def _written(engine: dict[str, Any]) -> None:
    if not any(worker["bytes_written"] for worker in engine["workers"]):
        raise CheckFailedError(
            f"no KV layer in reach of the workers of DP{engine['dp_rank']}",
            "known bytes in every layer of at least one",
            "Report it with the engine's arguments, or leave out kv_probe with SPLINT_PATCHES.",
            {"workers": engine["workers"]},
        )


def _same(engine: dict[str, Any], worker: dict[str, Any], how: str, hint: str) -> None:
    if worker["differing"]:
        first = next(iter(worker["differing"]))
        raise CheckFailedError(
            f"{sum(worker['differing'].values())} differing bytes in {len(worker['differing'])} layers of"
            f" {where(engine, worker)}, first in {first}, {how}",
            "every byte as it was written",
            hint,
            {"differing": worker["differing"]},
        )


def _sized(engine: dict[str, Any], worker: dict[str, Any]) -> None:
    found, wanted = worker["bytes_per_token"], worker["bytes_per_token_wanted"]
    if found != wanted:
        raise CheckFailedError(
            f"{found:g} bytes a token in the KV tensors of {where(engine, worker)}",
            f"{wanted:g} bytes a token, as the {worker['said_by']} says",
            "Another package changes the KV cache's layout: remove it, or report this with the engine's arguments.",
        )


def run(context: Context) -> Evidence:
    return judge(probing.ask(context, "kv_round_trip"))


CHECK = Check(
    "kv_round_trip",
    "Bytes in every layer's KV blocks come back as written, stored to and loaded from LMCache too.",
    probing.applies,
    run,
)
