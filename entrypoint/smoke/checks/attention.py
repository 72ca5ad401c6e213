"""The engine's attention computes what attention is, on its own KV cache at the configured KV dtype."""

from __future__ import annotations

from typing import Any

from entrypoint.smoke import probing
from entrypoint.smoke.check import Check, CheckFailedError, Context, DoesNotApplyError, Evidence
from entrypoint.smoke.probing import where

__all__ = ["CHECK", "judge"]


def judge(engines: list[dict[str, Any]]) -> Evidence:
    """Evidence that every layer that was tried is as near to the reference as rounding allows.

    Raises:
        CheckFailedError: one is not, or its trial broke off.
        DoesNotApplyError: no layer could be tried.
    """
    workers = [(engine, worker) for engine in engines for worker in engine.get("workers", ())]
    for engine, worker in workers:
        for layer, error in worker["broken"].items():
            raise _broken(where(engine, worker), layer, error)
    if not any(worker["layers"] for _, worker in workers):
        reasons = {engine["skipped"] for engine in engines if "skipped" in engine}
        reasons |= {reason for _, worker in workers for reason in worker["skipped"].values()}
        raise DoesNotApplyError("; ".join(sorted(reasons)) or "no worker has an attention layer")
    for engine, worker in workers:
        for layer, batches in worker["layers"].items():
            for batch, found in batches.items():
                _near(where(engine, worker), layer, batch, found)
    return {"engines": engines}


def _broken(worker: str, layer: str, error: str) -> CheckFailedError:
    return CheckFailedError(
        f"no answer of {layer} of {worker} ({error})",
        "one to hold against the reference",
        "The worker's log has the traceback. Report it with the engine's arguments; SPLINT_PATCHES=-kv_probe leaves out"
        " this check and kv_round_trip.",
        {"layer": layer, "error": error},
    )


def _near(worker: str, layer: str, batch: str, found: dict[str, float]) -> None:
    # Not "share > 1": that is false for NaN.
    if not found["share_of_bound"] <= 1:
        raise CheckFailedError(
            f"{layer} of {worker} {found['error']:.4g} away from the float32 reference ({batch})",
            f"{found['bound']:.4g} at most, which rounding explains",
            "Attention reads or writes the KV cache wrongly. Do not serve: try another attention backend or KV dtype.",
            {"layer": layer, "batch": batch, **found},
        )


def run(context: Context) -> Evidence:
    return judge(probing.ask(context, "attention"))


CHECK = Check(
    "attention",
    "Attention over the KV cache agrees with a float32 reference as far as rounding allows.",
    probing.applies,
    run,
)
