"""Requests at the same time get their own answers, not one another's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from entrypoint.smoke import chatting
from entrypoint.smoke.ask import complete
from entrypoint.smoke.check import Check, CheckFailedError, Context, DoesNotApplyError, Evidence
from entrypoint.smoke.prompts import Tokens
from entrypoint.smoke.scoring import LEAST_SIGNAL, Answer, distance

if TYPE_CHECKING:
    from patches.serving_gate.plan import SmokePlan

__all__ = ["CHECK"]

AT_ONCE = 8
COMPARED = 2
GENERATED = 2
PROMPT_TOKENS = 24


def applies(plan: SmokePlan) -> str | None:
    if plan.level == "quick":
        return "SPLINT_SMOKE=quick leaves it out"
    return chatting.applies(plan)


def _ask(context: Context, prompt: list[int]) -> Answer:
    return complete(
        context.server, prompt, min(GENERATED, context.plan.generated), salt=Tokens(context.plan.vocab_size).salt()
    )


def run(context: Context) -> Evidence:
    source = Tokens(context.plan.vocab_size)
    length = max(1, min(PROMPT_TOKENS, context.plan.max_model_len - context.plan.generated))
    prompts = [source.prompt(length) for _ in range(AT_ONCE)]
    alone = [_ask(context, prompt) for prompt in prompts[:COMPARED]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = list(pool.map(lambda prompt: _ask(context, prompt), prompts))
    evidence: Evidence = {"requests": AT_ONCE, "compared": COMPARED, "own": [], "nearest_other": []}
    told = False
    for index, answer in enumerate(alone):
        own = distance(answer, together[index])
        others = min(distance(answer, other) for at, other in enumerate(together) if at != index)
        evidence["own"].append(own)
        evidence["nearest_other"].append(others)
        # Not "own >= others": that is false for NaN. Where answers do not depend on prompts, both are noise.
        mute = max(own, others) < LEAST_SIGNAL
        told = told or not mute
        if not own < others and not mute:
            raise CheckFailedError(
                f"an answer {own:.4g} nats from the one that its prompt gets alone, with {AT_ONCE} requests at once",
                f"less than the {others:.4g} nats to the nearest answer to another prompt",
                "Answers are mixed up or wrong under load. Do not serve: keep the logs and the verdict.",
                evidence,
            )
    if not told:
        raise DoesNotApplyError("this model's answers do not depend on prompts, so none could be told apart", evidence)
    return evidence


CHECK = Check("parallel", "Requests at the same time get their own answers.", applies, run, share=0.2)
