"""What the checks share that ask the engines themselves, through the control calls of the closed gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from entrypoint.smoke.check import CheckFailedError, Context
from patches.framework.records import Feature

if TYPE_CHECKING:
    from patches.serving_gate.plan import SmokePlan

__all__ = ["applies", "ask", "where"]


def applies(plan: SmokePlan) -> str | None:
    """None where the engines can be asked, else the reason why not."""
    if not plan.secret:
        return "the engine's own memory is in reach only behind a closed gate"
    return (
        None
        if Feature.PROBED.value in plan.features
        else "the engines answer no control calls (kv_probe left out, or a Ray back end)"
    )


def where(engine: dict[str, Any], worker: dict[str, Any]) -> str:
    """The worker's name in messages."""
    return f"DP{engine['dp_rank']} rank {worker['rank']}"


def ask(context: Context, name: str) -> list[dict[str, Any]]:
    """The answers of all engines of this server, every one of which could carry the probe out.

    Raises:
        CheckFailedError: one is missing, stays busy, or could not do it.
    """
    engines = context.server.control(name)
    missing = set(context.plan.dp_ranks) - {engine["dp_rank"] for engine in engines}
    if missing:
        raise CheckFailedError(
            f"no answer of DP ranks {sorted(missing)}",
            f"one of each of {sorted(context.plan.dp_ranks)}",
            "Look in those engines' logs.",
        )
    for engine in engines:
        if "busy" in engine:
            raise CheckFailedError(
                f"DP{engine['dp_rank']} with requests that do not end",
                "an engine without requests between two checks",
                "Look for a stalled request in its log.",
            )
        if "error" in engine:
            error = engine["error"]
            raise CheckFailedError(f"{error['found']} (DP{engine['dp_rank']})", error["wanted"], error["hint"])
    return engines
