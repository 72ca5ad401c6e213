"""The streamed answer is the whole answer in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openai import APIStatusError

from entrypoint.smoke import chatting
from entrypoint.smoke.chatting import Turn
from entrypoint.smoke.check import Check, CheckFailedError, Context, Evidence
from entrypoint.smoke.checks import chat
from entrypoint.smoke.prompts import Tokens

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionChunk

__all__ = ["CHECK"]


def _add(turn: Turn, chunk: ChatCompletionChunk) -> None:
    for choice in chunk.choices:
        extra = choice.delta.model_extra or {}
        turn.text += extra.get("reasoning") or extra.get("reasoning_content") or ""
        turn.text += choice.delta.content or ""
        turn.tokens += tuple((choice.model_extra or {}).get("token_ids") or ())
        turn.finish_reason = choice.finish_reason or turn.finish_reason
    if chunk.usage:
        turn.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.usage.total_tokens)


def ask(context: Context) -> tuple[Turn, int]:
    """One chat turn as a stream, and the number of its chunks.

    Raises:
        DoesNotApplyError: the server says that the model can't chat.
    """
    request = chatting.arguments(context, Tokens(context.plan.vocab_size).salt())
    turn, chunks = Turn(), 0
    try:
        for chunk in context.server.openai.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        ):
            _add(turn, chunk)
            chunks += 1
    except APIStatusError as error:
        if skip := chatting.refused(error):
            raise skip from error
        raise
    return turn, chunks


def run(context: Context) -> Evidence:
    whole = chat.ask(context)
    streamed, chunks = ask(context)
    evidence = {**chatting.judge(context, streamed), "chunks": chunks}
    if (streamed.tokens, streamed.text) != (whole.tokens, whole.text):
        raise CheckFailedError(
            f"the streamed text {streamed.text!r} (tokens {list(streamed.tokens)})",
            f"the text of the same request not streamed, {whole.text!r} (tokens {list(whole.tokens)})",
            "Greedy answers to one prompt differ from run to run: compare with SPLINT_MODE=off before serving.",
            evidence,
        )
    return evidence


CHECK = Check("stream", "The same chat completion streamed gives the same text.", chatting.applies, run)
