"""The agreement of the DP ranks on one KV budget, step by step.

Each step is one word of every rank, which DP0 reads, and one word of DP0, which every rank reads:

1. ``hello``: place and flags, before the model is loaded. Ranks that can't have one budget stop here.
2. ``measured``: bytes a worker, before anything is planned. DP0 decides.
3. ``planned``: blocks, before anything is allocated. DP0 holds them against the decision.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from patches.framework.errors import BudgetError
from patches.kv_budget.budget import KVCacheBudget, RankBlocks, assert_kv_consistent_before_init
from patches.kv_budget.channel import REDUCER, Channel, SilentRanksError
from patches.kv_budget.decision import Decision, compare_hellos, decide, describe, table
from patches.kv_budget.measurement import Hello, Measurement, from_json, to_json

__all__ = ["HELLO_TIMEOUT_S", "Agreement", "own_row"]

logger = logging.getLogger("vllm.splint.kv_budget")

HELLO_TIMEOUT_S = 60.0
ANSWER_GRACE_S = 30.0


class Agreement:
    """One rank's part in the agreement.

    Args:
        channel: The group's words.
        policy: ``align``, ``report`` or ``strict``.
        ep_size: Expert-parallel size.
        timeout_s: How long a rank may take to measure: loading a model is part of it.

    Attributes:
        decision: What was decided, once :meth:`measured` has returned.
        rows: The table of all ranks; in DP0 only.
    """

    def __init__(self, channel: Channel, *, policy: str, ep_size: int, timeout_s: float) -> None:
        self.channel = channel
        self.policy = policy
        self.ep_size = ep_size
        self.timeout_s = timeout_s
        self.decision: Decision | None = None
        self.rows: list[dict[str, Any]] = []

    def hello(self, own: Hello) -> None:
        """Say where this rank is and how it was started; every rank must have come with the same.

        Raises:
            BudgetError: a rank differs, or does not take part.
        """

        def reduce(words: list[str]) -> str:
            compare_hellos([from_json(Hello, word) for word in words], self.policy)
            return "{}"

        hint = "Does its node run vllm-splint, with kv_budget in SPLINT_PATCHES?"
        self._exchange("hello", to_json(own), reduce, min(self.timeout_s, HELLO_TIMEOUT_S), hint)

    def watched(self) -> list[Hello]:
        """The hellos of those whom this rank watches: the next one, in a ring, and DP0, which holds the store."""
        own = self.channel.rank
        ranks = dict.fromkeys(((own + 1) % self.channel.size, REDUCER))
        words = [self.channel.hear("hello", rank, HELLO_TIMEOUT_S) for rank in ranks if rank != own]
        return [from_json(Hello, word) for word in words]

    def measured(self, own: Measurement) -> list[int]:
        """Say what this rank measured; returns the bytes a worker that it may plan with.

        Raises:
            BudgetError: the ranks can't have one budget, or one did not report in time.
        """

        def reduce(words: list[str]) -> str:
            measurements = [from_json(Measurement, word) for word in words]
            decision = decide(measurements, policy=self.policy, ep_size=self.ep_size)
            self.rows = table(measurements, decision)
            _log(measurements, self.rows, self.policy)
            return decision.to_json()

        hint = "See its log; SPLINT_KV_BUDGET_TIMEOUT_S gives ranks longer."
        text = self._exchange("measured", to_json(own), reduce, self.timeout_s, hint)
        self.decision = Decision(**json.loads(text))
        return self.decision.memory_for(own)

    def planned(self, own: RankBlocks, max_model_len: int) -> None:
        """Say what this rank is about to allocate. Returns once every rank has said the same (``report``: anything).

        Raises:
            BudgetError: a rank's plan differs from the decision.
        """

        def reduce(words: list[str]) -> str:
            plans = [json.loads(word) for word in words]
            _settle(self.rows, plans)
            if self.policy != "report":
                _check_plans(plans, self.decision.budget if self.decision else None)
            return "{}"

        word = json.dumps({**vars(own), "max_model_len": max_model_len})
        self._exchange("planned", word, reduce, self.timeout_s, "See its log.")

    def _exchange(self, topic: str, word: str, reduce: Callable[[list[str]], str], timeout_s: float, hint: str) -> str:
        self.channel.say(topic, word)
        if self.channel.rank == REDUCER:
            self.channel.say(f"{topic}/all", self._reduced(topic, reduce, timeout_s, hint))
        answer = json.loads(self._answer(topic, timeout_s))
        if "refused" in answer:
            self.channel.heard(topic)
            raise BudgetError(*answer["refused"])
        return str(answer["text"])

    def _reduced(self, topic: str, reduce: Callable[[list[str]], str], timeout_s: float, hint: str) -> str:
        """What DP0 makes of all words: a text for all, or a refusal for all."""
        try:
            return json.dumps({"text": reduce(self.channel.gather(topic, timeout_s))})
        except SilentRanksError as error:
            names = ", ".join(f"DP{rank}" for rank in error.ranks)
            found = f"KV budget: {names} did not report within {timeout_s:g} s ({topic}, missing ranks {error.ranks})"
            return json.dumps({"refused": [found, f"all {self.channel.size} DP ranks", hint]})
        except BudgetError as error:
            return json.dumps({"refused": [error.found, error.wanted, error.remedy]})
        except (KeyError, TypeError, ValueError) as error:
            found = f"KV budget: DP{REDUCER} can't read what a rank said ({topic}): {type(error).__name__}: {error}"
            return json.dumps({"refused": [found, "one release of vllm-splint on all nodes", "Use one image."]})

    def _answer(self, topic: str, timeout_s: float) -> str:
        """What DP0 published. Its time runs from its own word on: a rank that waits longer must not give up first."""
        try:
            self.channel.hear(topic, REDUCER, timeout_s)
        except SilentRanksError:
            raise BudgetError(
                f"KV budget: DP{REDUCER} did not report within {timeout_s:g} s ({topic}, missing ranks [{REDUCER}])",
                f"all {self.channel.size} DP ranks",
                "See its log.",
            ) from None
        try:
            return self.channel.hear(f"{topic}/all", REDUCER, timeout_s + ANSWER_GRACE_S)
        except SilentRanksError:
            raise BudgetError(
                f"KV budget: DP{REDUCER} published nothing on {topic!r} within {timeout_s + ANSWER_GRACE_S:g} s",
                "its decision",
                "See the log of that rank.",
            ) from None


def own_row(plan: RankBlocks, max_model_len: int) -> dict[str, Any]:
    """What a rank's row says about its plan."""
    return {
        "dp_rank": plan.dp_rank,
        "blocks": plan.num_blocks,
        "tokens": plan.num_blocks * plan.block_size,
        "max_model_len": max_model_len,
    }


def _settle(rows: list[dict[str, Any]], plans: list[dict[str, Any]]) -> None:
    """Put what each rank really planned into the table."""
    for row, plan in zip(rows, plans, strict=True):
        own = RankBlocks(**{name: value for name, value in plan.items() if name != "max_model_len"})
        row.update(own_row(own, plan["max_model_len"]))


def _check_plans(plans: list[dict[str, Any]], budget: KVCacheBudget | None) -> None:
    lengths = [plan.pop("max_model_len") for plan in plans]
    ranks = [RankBlocks(**plan) for plan in plans]
    agreed = assert_kv_consistent_before_init(ranks)
    if budget is not None and agreed.per_dp_blocks != budget.per_dp_blocks:
        raise BudgetError(
            f"KV budget: the ranks planned {agreed.per_dp_blocks} blocks",
            f"the agreed {budget.per_dp_blocks}",
            "This is a fault of vllm-splint or of another plugin that changes the plan: please report it.",
        )
    if len(set(lengths)) > 1:
        raise BudgetError(
            f"KV budget: max_model_len came out as {sorted(set(lengths))}",
            "one length on every DP rank",
            "Set --max-model-len explicitly.",
        )


def _log(measurements: list[Measurement], rows: list[dict[str, Any]], policy: str) -> None:
    """The table of ranks, once, and one line where they differ."""
    lines = [
        f"  DP{row['dp_rank']:<5} {row['host']} {row['device']}: measured {row['measured_blocks']} blocks,"
        f" uses {row['blocks']} ({row['tokens']} tokens)"
        for row in rows
    ]
    logger.info("KV budget (SPLINT_KV_BUDGET=%s) of %d DP ranks:\n%s", policy, len(rows), "\n".join(lines))
    if len({row["measured_blocks"] for row in rows}) > 1:
        logger.warning("%s.", describe(measurements))
