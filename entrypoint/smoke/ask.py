"""One greedy completion of a token-id prompt, as numbers: no tokenizer is needed to ask or to compare."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import openai

from entrypoint.smoke.check import DoesNotApplyError
from entrypoint.smoke.scoring import Answer
from entrypoint.smoke.server import RANK_HEADER, Server

if TYPE_CHECKING:
    from openai.types import CompletionChoice

__all__ = ["NO_EXTENSIONS", "complete", "refusal"]

NO_EXTENSIONS = "the server has not vLLM's extensions of the API: answers come without token ids"

_PREFIX = "token_id:"
_MAX_ALLOWED = re.compile(r"max allowed: (\d+)")

# What a server answers where an endpoint does not apply to its model: status, and words of the message.
_REFUSALS = (
    (400, "chat template"),
    (400, "skip_tokenizer_init"),
    (404, "Not Found"),
    (501, "does not support"),
)


def refusal(error: openai.APIStatusError) -> str | None:
    """The reason that ``error`` gives for not having the endpoint at all, or None for any other error."""
    for status, words in _REFUSALS:
        if error.status_code == status and words in error.message:
            return error.message
    return None


def _distribution(top: dict[str, float]) -> dict[int, float]:
    return {int(token.removeprefix(_PREFIX)): value for token, value in top.items()}


def _answer(choice: CompletionChoice) -> Answer:
    extra: dict[str, Any] = choice.model_extra or {}
    top = choice.logprobs.top_logprobs if choice.logprobs else None
    return Answer(tuple(extra.get("token_ids") or ()), tuple(_distribution(step) for step in top or ()))


def complete(
    server: Server,
    prompt: list[int],
    max_tokens: int,
    engine: int | None = None,
    salt: str | None = None,
) -> Answer:
    """Ask for exactly ``max_tokens`` greedy tokens with the most likely alternatives of each.

    Args:
        server: The server to ask.
        prompt: Token ids.
        max_tokens: How many tokens to generate, whatever they are.
        engine: Index of the engine among those that this server owns, or None to leave it to the load balancer.
        salt: Keeps the prompt apart from the same prompt under another salt in every cache.

    Raises:
        DoesNotApplyError: the model has no completions endpoint, or the server is not vLLM.
        openai.OpenAIError: anything else that went wrong.
    """
    if not server.extensions:
        raise DoesNotApplyError(NO_EXTENSIONS)
    asked = server.top  # another thread may lower it meanwhile
    body: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
    if salt is not None:
        body["cache_salt"] = salt
    try:
        completion = server.openai.completions.create(
            model=server.model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0.0,
            logprobs=asked,
            extra_headers={} if engine is None else {RANK_HEADER: str(engine)},
            extra_body=body,
        )
    except openai.APIStatusError as error:
        if reason := refusal(error):
            raise DoesNotApplyError(reason) from error
        if (lower := _lower_limit(asked, error)) is not None:
            server.top = lower
            return complete(server, prompt, max_tokens, engine, salt)
        raise
    return _answer(completion.choices[0])


def _lower_limit(asked: int, error: openai.APIStatusError) -> int | None:
    """The server's ``--max-logprobs``, if ``error`` says that it is below what was ``asked`` for."""
    limit = _MAX_ALLOWED.search(error.message)
    return int(limit[1]) if limit and int(limit[1]) < asked else None
