"""LMCache is there, in the scheduler and in every worker, and not in the mode that caches nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from entrypoint.smoke import probing
from entrypoint.smoke.check import Check, CheckFailedError, Context, Evidence
from patches.serving_gate.plan import is_lmcache

if TYPE_CHECKING:
    from patches.serving_gate.plan import SmokePlan

__all__ = ["CHECK", "judge"]


def applies(plan: SmokePlan) -> str | None:
    if not any(map(is_lmcache, plan.connectors)):
        return "LMCache is not the KV connector"
    return probing.applies(plan)


def judge(engines: list[dict[str, Any]]) -> Evidence:
    """Evidence of a connector that works on both sides.

    Raises:
        CheckFailedError: a side is missing, degraded, or has no layers registered.
    """
    for engine in engines:
        _sound(f"the scheduler of DP{engine['dp_rank']}", engine["scheduler"])
        for worker in engine["workers"]:
            name = probing.where(engine, worker)
            _sound(name, worker)
            if not worker.get("registered_layers", 1):
                raise _failure(f"no KV layer of {name} registered with LMCache", worker)
    return {"engines": engines}


def _sound(name: str, state: dict[str, Any]) -> None:
    if state["connector"] is None:
        raise _failure(f"no LMCache connector in {name}", state)
    if not state["healthy"]:
        raise _failure(f"a degraded LMCache connector in {name}{_said(state)}", state)


def _said(state: dict[str, Any]) -> str:
    lines = state.get("reason", "").strip().splitlines()
    return f" ({lines[-1]})" if lines else ""


def _failure(found: str, state: dict[str, Any]) -> CheckFailedError:
    return CheckFailedError(
        found,
        "one that stores and loads",
        "It would serve and cache nothing: look in the logs of the engine and of lmcache server.",
        state,
    )


def run(context: Context) -> Evidence:
    return judge(probing.ask(context, "lmcache"))


CHECK = Check("lmcache", "LMCache works in the scheduler and in every worker.", applies, run, share=0.1)
