"""The model's log-probabilities are numbers that log-probabilities can be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from entrypoint.smoke import chatting
from entrypoint.smoke.ask import complete
from entrypoint.smoke.check import Check, CheckFailedError, Context, Evidence
from entrypoint.smoke.prompts import Tokens

if TYPE_CHECKING:
    from entrypoint.smoke.scoring import Answer

__all__ = ["CHECK"]

PROMPT_TOKENS = 12


def _values(answer: Answer) -> list[float]:
    return [value for step in answer.top for value in step.values()]


def run(context: Context) -> Evidence:
    generated = context.plan.generated
    length = max(1, min(PROMPT_TOKENS, context.plan.max_model_len - generated))
    answer = complete(context.server, Tokens(context.plan.vocab_size).prompt(length), generated)
    values = _values(answer)
    evidence = {"tokens": list(answer.tokens), "lowest": min(values, default=0.0), "highest": max(values, default=0.0)}
    if len(answer.tokens) != generated or not all(answer.top) or len(answer.top) != generated:
        raise CheckFailedError(
            f"{len(answer.tokens)} tokens with log-probabilities for {sum(map(bool, answer.top))}",
            f"{generated} of both",
            "Look for errors in the engine's log.",
            evidence,
        )
    # --logprobs-mode may ask for logits, which have no upper bound.
    bound = math.inf if str(context.plan.to_json().get("logprobs_mode")).endswith("logits") else 0.0
    if not all(math.isfinite(value) and value <= bound for value in values):
        raise CheckFailedError(
            f"log-probabilities between {evidence['lowest']} and {evidence['highest']}",
            "finite numbers, none above 0",
            "The model's numbers are broken: look at the weights, the dtype and the quantisation.",
            evidence,
        )
    return evidence


CHECK = Check("logprobs", "Log-probabilities of a completion are finite and at most 0.", chatting.applies, run)
