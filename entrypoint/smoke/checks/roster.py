"""Every process of the server has attested that it carries the same patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoint.smoke.check import Check, CheckFailedError, Context, Evidence
from patches.framework import roster

if TYPE_CHECKING:
    from patches.serving_gate.plan import SmokePlan

__all__ = ["CHECK"]


def applies(plan: SmokePlan) -> str | None:
    return None if plan.expected_roster else "the server was given no roster to compare with"


def run(context: Context) -> Evidence:
    if context.run_dir is None:
        raise CheckFailedError("no run directory", "the folder with the attestations", "Set SPLINT_RUN_DIR.")
    attested = roster.load(context.run_dir)
    problems = roster.compare(context.plan.expected_roster, attested)
    if problems:
        raise CheckFailedError(
            "; ".join(problems),
            f"{len(context.plan.expected_roster)} processes with the same patches and versions",
            "Start every process from one image and environment; where VLLM_PLUGINS is set, name vllm_splint in it.",
            {"problems": problems},
        )
    return {"expected": len(context.plan.expected_roster), "attested": len(attested)}


CHECK = Check("roster", "Every process attested the same patches and versions.", applies, run, share=0.1)
