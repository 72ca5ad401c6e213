"""The data-parallel ranks allocated one KV budget, as each of them says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from entrypoint.smoke.check import Check, CheckFailedError, Context, DoesNotApplyError, Evidence
from patches.framework import roster
from patches.framework.report import kv_budget

if TYPE_CHECKING:
    from patches.serving_gate.plan import SmokePlan

__all__ = ["CHECK"]


def applies(plan: SmokePlan) -> str | None:
    return None if plan.expected_roster else "the server was given no roster to read the budgets from"


def run(context: Context) -> Evidence:
    if context.run_dir is None:
        raise CheckFailedError("no run directory", "the folder with the attestations", "Set SPLINT_RUN_DIR.")
    processes = roster.load(context.run_dir)
    budget = kv_budget(processes)
    if budget is None:
        raise DoesNotApplyError("no engine core of this node carries the kv_budget patch")
    if not budget["applies"]:
        raise DoesNotApplyError(str(budget["reason"]))
    if budget["policy"] == "report":
        raise DoesNotApplyError("SPLINT_KV_BUDGET=report: the ranks' budgets are told, not made equal")
    blocks = {f"DP{row['dp_rank']}": row["blocks"] for row in [*budget["ranks"], *_own(processes)]}
    if len(set(blocks.values())) > 1 or 0 in blocks.values():
        raise CheckFailedError(
            f"KV blocks by rank: {blocks}",
            "the same number on every rank",
            "Look in the log of each rank for what it allocated, and report this: it was agreed otherwise.",
            {"blocks": blocks},
        )
    return {"blocks": blocks, "policy": budget["policy"]}


def _own(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each engine core of this node says of itself; it wins over what DP0 says of it."""
    return [row for entry in processes for row in entry["facts"].get("kv_budget", {}).get("own", [])]


CHECK = Check("kv_budget", "Every data-parallel rank allocated the same KV budget.", applies, run, share=0.1)
