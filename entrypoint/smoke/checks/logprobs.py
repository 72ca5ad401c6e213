"""The model's log-probabilities are numbers that log-probabilities can be."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from entrypoint.smoke import chatting
from entrypoint.smoke.ask import complete
from entrypoint.smoke.check import Check, CheckFailedError, Context, Evidence
from entrypoint.smoke.prompts import Tokens
from entrypoint.smoke.series import MAX_PARALLEL

if TYPE_CHECKING:
    from entrypoint.smoke.scoring import Answer

__all__ = ["CHECK"]

PROMPT_TOKENS = 12


def _values(answer: Answer) -> list[float]:
    return [value for step in answer.top for value in step.values()]


def run(context: Context) -> Evidence:
    """Ask all ranks at once: a rank compiles code for its first log-probabilities, which takes seconds."""
    plan = context.plan
    length = max(1, min(PROMPT_TOKENS, plan.max_model_len - plan.generated))
    prompt = Tokens(plan.vocab_size).prompt(length)
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        answers = list(
            pool.map(lambda rank: complete(context.server, prompt, plan.generated, plan.address(rank)), plan.served)
        )
    return {
        "ranks": {str(rank): _judge(context, rank, answer) for rank, answer in zip(plan.served, answers, strict=True)}
    }


def _judge(context: Context, rank: int, answer: Answer) -> Evidence:
    """Evidence of a rank's sound log-probabilities.

    Raises:
        CheckFailedError: some are missing, or no log-probabilities.
    """
    generated, values = context.plan.generated, _values(answer)
    evidence = {"tokens": list(answer.tokens), "lowest": min(values, default=0.0), "highest": max(values, default=0.0)}
    if len(answer.tokens) != generated or not all(answer.top) or len(answer.top) != generated:
        raise CheckFailedError(
            f"{len(answer.tokens)} tokens with log-probabilities for {sum(map(bool, answer.top))} from DP rank {rank}",
            f"{generated} of both",
            "Look for errors in the engine's log.",
            evidence,
        )
    # --logprobs-mode may ask for logits, which have no upper bound.
    bound = math.inf if context.plan.logprobs_mode.endswith("logits") else 0.0
    if not all(math.isfinite(value) and value <= bound for value in values):
        raise CheckFailedError(
            f"log-probabilities between {evidence['lowest']} and {evidence['highest']} from DP rank {rank}",
            "finite numbers, none above 0",
            "The model's numbers are broken: look at the weights, the dtype and the quantisation.",
            evidence,
        )
    return evidence


CHECK = Check(
    "logprobs", "Log-probabilities of a completion are finite and at most 0, on every rank.", chatting.applies, run
)
