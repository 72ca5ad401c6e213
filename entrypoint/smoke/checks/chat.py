"""A greedy chat completion answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai

from entrypoint.smoke import chatting
from entrypoint.smoke.chatting import Turn
from entrypoint.smoke.check import Check, Context, Evidence
from entrypoint.smoke.prompts import Tokens

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionMessage

__all__ = ["CHECK", "ask"]


def _text(message: ChatCompletionMessage) -> str:
    extra = message.model_extra or {}
    reasoning = extra.get("reasoning") or extra.get("reasoning_content") or ""
    return f"{reasoning}{message.content or ''}"


def _turn(completion: ChatCompletion) -> Turn:
    choice, usage = completion.choices[0], completion.usage
    tokens = (choice.model_extra or {}).get("token_ids") or ()
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) if usage else (0, 0, 0)
    return Turn(_text(choice.message), tuple(tokens), choice.finish_reason, counts)


def ask(context: Context) -> Turn:
    """One chat turn, answered whole.

    Raises:
        DoesNotApplyError: the server says that the model can't chat.
    """
    request = chatting.arguments(context, Tokens(context.plan.vocab_size).salt())
    try:
        return _turn(context.server.openai.chat.completions.create(**request))
    except openai.APIStatusError as error:
        if skip := chatting.refused(error):
            raise skip from error
        raise


def run(context: Context) -> Evidence:
    return chatting.judge(context, ask(context))


CHECK = Check("chat", "A greedy chat completion answers, and its usage adds up.", chatting.applies, run)
