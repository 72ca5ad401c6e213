"""A stop string ends the answer right before it, and nothing else about the answer changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai

from entrypoint.smoke import chatting
from entrypoint.smoke.ask import refusal
from entrypoint.smoke.check import Check, CheckFailedError, Context, DoesNotApplyError, Evidence
from entrypoint.smoke.prompts import Tokens

if TYPE_CHECKING:
    from openai.types import CompletionChoice

__all__ = ["CHECK"]

PROMPT_TOKENS = 8
MAX_TOKENS = 8
TRIES = 4
_REPLACED = "\N{REPLACEMENT CHARACTER}"


def _complete(context: Context, prompt: list[int], stop: str | None) -> CompletionChoice:
    body = {"cache_salt": Tokens(context.plan.vocab_size).salt()} if context.plan.extensions else {}
    room = context.plan.max_model_len - len(prompt)
    try:
        return context.server.openai.completions.create(
            model=context.plan.model,
            prompt=prompt,
            max_tokens=max(1, min(MAX_TOKENS, room)),
            temperature=0.0,
            stop=stop,
            extra_body=body,
        ).choices[0]
    except openai.APIStatusError as error:
        if reason := refusal(error):
            raise DoesNotApplyError(f"the server says: {reason}") from error
        raise


def _letter(text: str) -> str | None:
    """A sign to stop at, not the first; a replacement character may be half of one that has not come to its end yet."""
    return next((sign for sign in text[1:] if sign.isprintable() and not sign.isspace() and sign != _REPLACED), None)


def run(context: Context) -> Evidence:
    length = max(1, min(PROMPT_TOKENS, context.plan.max_model_len - MAX_TOKENS))
    for _ in range(TRIES):
        prompt = Tokens(context.plan.vocab_size).prompt(length)
        text = _complete(context, prompt, None).text
        stop = _letter(text)
        if stop is None:
            continue
        stopped = _complete(context, prompt, stop)
        wanted = text[: text.index(stop)]
        evidence = {"text": text, "stop": stop, "stopped": stopped.text, "finish_reason": stopped.finish_reason}
        if (stopped.text, stopped.finish_reason) == (wanted, "stop"):
            return evidence
        if _complete(context, prompt, None).text == text:
            raise CheckFailedError(
                f"the text {stopped.text!r} with finish_reason {stopped.finish_reason!r} for the stop string {stop!r}",
                f"{wanted!r} and 'stop', since the same request without it gives {text!r}",
                "Look for errors in the API server's log; clients that rely on stop strings would not be stopped.",
                evidence,
            )
    raise DoesNotApplyError(f"no text that comes twice, to put a stop string into, in {TRIES} answers")


CHECK = Check("stop", "A stop string ends the answer right before it.", chatting.applies, run, share=0.1)
