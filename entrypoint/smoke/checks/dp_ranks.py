"""Every data-parallel rank that this server sends requests to answers, other nodes' too, as its own counters say."""

from __future__ import annotations

from entrypoint.smoke.ask import NO_EXTENSIONS, complete
from entrypoint.smoke.check import Check, CheckFailedError, Context, DoesNotApplyError, Evidence, always
from entrypoint.smoke.checks import pooling
from entrypoint.smoke.counters import PROMPT_TOKENS, REQUESTS
from entrypoint.smoke.prompts import Tokens

__all__ = ["CHECK", "NO_COUNTERS"]

PROMPT_LENGTH = 5
ROUNDS = 4
NO_COUNTERS = "the server publishes no engine counters (--disable-log-stats), so nothing could be counted"


def _took(context: Context, rank: int) -> dict[str, int]:
    """Send one request to a rank and return by how much the rank's own counters moved."""
    before = context.server.counters()
    address = context.plan.address(rank)
    complete(context.server, Tokens(context.plan.vocab_size).prompt(PROMPT_LENGTH), 1, address)
    after = context.server.counters_once(lambda now: now.moved(before, REQUESTS, rank) > 0)
    moved = {"requests": after.moved(before, REQUESTS, rank), "tokens": after.moved(before, PROMPT_TOKENS, rank)}
    if moved["requests"] < 1 or moved["tokens"] < PROMPT_LENGTH:
        raise CheckFailedError(
            f"DP rank {rank} counted {moved['requests']} requests and {moved['tokens']} prompt tokens",
            f"1 request of {PROMPT_LENGTH} prompt tokens there, for the request with X-data-parallel-rank {address}",
            f"Look in the log of engine {rank}; another rank has answered in its place.",
            {"moved": moved},
        )
    return moved


def _spread(context: Context) -> dict[str, int]:
    """Pool until every rank has counted a request: pooling requests go where the load balancer sends them."""
    ranks = context.plan.served
    before = after = context.server.counters()
    for _ in range(ROUNDS * len(ranks)):
        pooling.ask(context)
        after = context.server.counters()
        if all(after.moved(before, REQUESTS, rank) for rank in ranks):
            break
    after = context.server.counters_once(lambda now: all(now.moved(before, REQUESTS, rank) for rank in ranks))
    moved = {str(rank): after.moved(before, REQUESTS, rank) for rank in ranks}
    if not all(moved.values()):
        raise CheckFailedError(
            f"requests by DP rank: {moved}",
            f"at least one on each after {ROUNDS * len(ranks)} in all",
            "Look in the log of the engine that took none.",
            {"moved": moved},
        )
    return moved


def _ask_uncounted(context: Context) -> None:
    """Send each rank its request all the same: what goes wrong with a rank's first one does so now."""
    for rank in context.plan.served:
        if context.plan.runner == "pooling":
            pooling.ask(context)
        else:
            complete(
                context.server, Tokens(context.plan.vocab_size).prompt(PROMPT_LENGTH), 1, context.plan.address(rank)
            )


def run(context: Context) -> Evidence:
    if not context.plan.extensions:
        raise DoesNotApplyError(NO_EXTENSIONS)
    if not context.server.counters():
        _ask_uncounted(context)
        raise DoesNotApplyError(NO_COUNTERS)
    if context.plan.runner == "pooling":
        return {"ranks": _spread(context)}
    return {"ranks": {str(rank): _took(context, rank) for rank in context.plan.served}}


CHECK = Check("dp_ranks", "Every data-parallel rank that this server sends requests to took one.", always, run)
