"""One chat turn, asked for whole or as a stream, in a form that the two can be compared in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from entrypoint.smoke.ask import refusal
from entrypoint.smoke.check import CheckFailedError, Context, DoesNotApplyError

if TYPE_CHECKING:
    import openai

    from patches.serving_gate.plan import SmokePlan

__all__ = ["Turn", "applies", "arguments", "judge", "refused"]

MAX_TOKENS = 8
_LOOK = "Look for errors in the engine's log."
FINISHED = ("length", "stop", "tool_calls")


@dataclass
class Turn:
    """What one chat request brought.

    Attributes:
        text: Reasoning and content in order; empty where the tokens have no printable form.
        tokens: Ids of the generated tokens.
        finish_reason: As the API names it.
        usage: prompt, completion and total tokens, as the server counted them.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    usage: tuple[int, int, int] = (0, 0, 0)


def applies(plan: SmokePlan) -> str | None:
    """None for models that generate, else the reason why there is nothing to generate."""
    return "the model is a pooling model; it does not generate" if plan.runner == "pooling" else None


def arguments(context: Context, salt: str) -> dict[str, Any]:
    """The request, the same for both forms; the salt keeps one from finding the other's prompt in a cache."""
    return {
        "model": context.plan.model,
        "messages": [{"role": "user", "content": "Count from one to five."}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "extra_body": {"return_token_ids": True, "cache_salt": salt} if context.plan.extensions else {},
    }


def refused(error: openai.APIStatusError) -> DoesNotApplyError | None:
    """Whether the server said that this model can't chat, and nothing else."""
    reason = refusal(error)
    return DoesNotApplyError(f"the server says: {reason}") if reason else None


def judge(context: Context, turn: Turn) -> dict[str, Any]:
    """Evidence of a sound turn. A server without vLLM's extensions returns no token ids; its text stands for them.

    Raises:
        CheckFailedError: nothing was generated, or the server's own numbers contradict each other.
    """
    prompt, completion, total = turn.usage
    evidence = {"text": turn.text, "finish_reason": turn.finish_reason, "usage": list(turn.usage)}
    extended = context.plan.extensions
    if not (turn.tokens if extended else turn.text) or completion < 1:
        raise CheckFailedError("an empty answer", "at least one token", _LOOK, evidence)
    if turn.finish_reason not in FINISHED:
        raise CheckFailedError(
            f"finish_reason {turn.finish_reason!r}",
            f"one of {', '.join(FINISHED)}",
            _LOOK,
            evidence,
        )
    generated = len(turn.tokens) if extended else completion
    if total != prompt + completion or completion != generated or completion > MAX_TOKENS:
        raise CheckFailedError(
            f"usage {list(turn.usage)} for {len(turn.tokens)} generated tokens",
            f"[prompt, completion, their sum] with at most {MAX_TOKENS} completion tokens",
            "The API server and the engine disagree; start both from the same image.",
            evidence,
        )
    return evidence
