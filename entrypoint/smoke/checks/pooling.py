"""A pooling model answers with finite numbers, through whichever endpoint it has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import httpx
import openai

from entrypoint.smoke.check import Check, CheckFailedError, Context, Evidence
from entrypoint.smoke.prompts import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from patches.serving_gate.plan import SmokePlan

__all__ = ["CHECK", "ask", "numbers"]

PROMPT_LENGTH = 12


def applies(plan: SmokePlan) -> str | None:
    return None if plan.runner == "pooling" else "the model generates; it does not pool"


def numbers(data: Any) -> Iterator[float]:
    """Every number in nested lists, in order."""
    if isinstance(data, list):
        for item in data:
            yield from numbers(item)
    elif isinstance(data, (int, float)):
        yield float(data)


def _embedding(context: Context, prompt: list[int]) -> tuple[str, list[float]] | None:
    try:
        response = context.server.openai.embeddings.create(
            model=context.plan.model, input=prompt, encoding_format="float"
        )
    except (openai.NotFoundError, openai.BadRequestError, openai.InternalServerError):
        return None
    return "/v1/embeddings", list(numbers(response.data[0].embedding))


def _pooled(context: Context, prompt: list[int]) -> tuple[str, list[float]] | None:
    """The answer of the first plain pooling endpoint that the server has."""
    for path, field in (("/pooling", "data"), ("/classify", "probs")):
        response = context.server.post(path, {"model": context.plan.model, "input": prompt})
        if response.status_code == httpx.codes.OK:
            return path, list(numbers(response.json()["data"][0][field]))
    return None


def ask(context: Context) -> tuple[str, list[float]]:
    """The endpoint that answered a random prompt, and its numbers.

    Raises:
        CheckFailedError: none answered.
    """
    prompt = Tokens(context.plan.vocab_size).prompt(min(PROMPT_LENGTH, context.plan.max_model_len))
    answer = _embedding(context, prompt) or _pooled(context, prompt)
    if answer is None:
        raise CheckFailedError(
            "no answer from /v1/embeddings, /pooling and /classify",
            "one of them to answer a prompt of token ids",
            "Look for errors in the API server's log.",
        )
    return answer


def run(context: Context) -> Evidence:
    path, values = ask(context)
    if not values or not all(map(math.isfinite, values)):
        raise CheckFailedError(
            f"{sum(not math.isfinite(value) for value in values)} of {len(values)} numbers not finite from {path}",
            "finite numbers",
            "The model's numbers are broken: look at the weights and the dtype.",
        )
    return {"endpoint": path, "numbers": len(values), "lowest": min(values), "highest": max(values)}


CHECK = Check("pooling", "A pooling request answers with finite numbers.", applies, run)
