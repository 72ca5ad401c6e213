"""A prompt as long as the context allows is taken whole; one token more is refused, not cut."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import httpx
import openai

from entrypoint.smoke import chatting
from entrypoint.smoke.ask import refusal
from entrypoint.smoke.check import Check, CheckFailedError, Context, DoesNotApplyError, Evidence
from entrypoint.smoke.prompts import Tokens
from patches.framework.records import Feature

if TYPE_CHECKING:
    from patches.serving_gate.plan import SmokePlan

__all__ = ["CHECK", "LONGEST"]

LONGEST = 32768
"""Tokens beyond which a prompt is not made longer."""
FIRST = 1024
"""Tokens of the prompt that tells how fast this server prefills."""
BUDGET_S = 5.0
"""Seconds that the longest prompt may take; where it would take more, it is made shorter."""

_NOT_STORED = {"lmcache.max_offload_tokens": 0}
"""Tells LMCache to store nothing of these prompts, which nobody asks for again."""


def applies(plan: SmokePlan) -> str | None:
    if plan.level == "quick":
        return "SPLINT_SMOKE=quick leaves it out"
    return chatting.applies(plan) or (None if plan.extensions else "the server does not publish its context length")


def _ask(context: Context, length: int) -> Any:
    return context.server.openai.completions.create(
        model=context.plan.model,
        prompt=Tokens(context.plan.vocab_size).prompt(length),
        max_tokens=1,
        temperature=0.0,
        logprobs=min(1, context.server.top),
        extra_body={"kv_transfer_params": _NOT_STORED} if Feature.LMCACHE.value in context.plan.features else {},
    )


def _taken(context: Context, length: int) -> Evidence:
    try:
        answer = _ask(context, length)
    except openai.APIStatusError as error:
        if reason := refusal(error):
            raise DoesNotApplyError(f"the server says: {reason}") from error
        raise
    usage, choice = answer.usage, answer.choices[0]
    values = (choice.logprobs.token_logprobs if choice.logprobs else None) or []
    counted = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
    evidence = {"prompt_tokens": length, "counted": list(counted), "logprobs": values}
    if counted != (length, 1):
        raise CheckFailedError(
            f"{counted[0]} prompt tokens and {counted[1]} of the answer counted for a prompt of {length}",
            f"{length} and 1",
            "Something before the engine changes prompts: look at proxies, middleware and --max-model-len.",
            evidence,
        )
    if len(values) != 1 or not all(value is not None and math.isfinite(value) for value in values):
        raise CheckFailedError(
            f"log-probabilities {values} after {length} tokens",
            "one, and finite",
            "The model's numbers break down with length: lower --max-model-len, look at rope scaling and KV dtype.",
            evidence,
        )
    return evidence


def _refused(context: Context, length: int) -> None:
    try:
        _ask(context, length)
    except openai.APIStatusError as error:
        if error.status_code == httpx.codes.BAD_REQUEST:
            return
        raise
    raise CheckFailedError(
        f"an answer to a prompt of {length} tokens",
        f"status 400: the context length is {context.plan.max_model_len}",
        "The server cuts prompts or has another --max-model-len than it says.",
    )


def _affordable(context: Context, longest: int) -> int:
    """Tokens up to ``longest`` that this server prefills in time; attention may cost the square of them."""
    if longest <= FIRST:
        return longest
    start = time.monotonic()
    _taken(context, FIRST)
    spent = time.monotonic() - start
    return max(FIRST, min(longest, LONGEST, int(FIRST * math.sqrt(BUDGET_S / spent))))


def run(context: Context) -> Evidence:
    longest = context.plan.max_model_len - 1
    length = _affordable(context, longest)
    evidence = _taken(context, length)
    if length == longest:
        _refused(context, context.plan.max_model_len + 1)
        return {**evidence, "beyond": "refused"}
    return {**evidence, "beyond": f"not asked: the whole context of {longest + 1} tokens would take too long"}


CHECK = Check("long_prompt", "A prompt as long as the context is taken whole, a longer one refused.", applies, run)
