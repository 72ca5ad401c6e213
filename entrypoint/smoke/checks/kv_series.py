"""What the KV caches give back is what a cold run computes: decoded, from the prefix cache, from LMCache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from entrypoint.smoke import chatting, probing
from entrypoint.smoke.ask import NO_EXTENSIONS
from entrypoint.smoke.check import Check, CheckFailedError, Context, DoesNotApplyError, Evidence
from entrypoint.smoke.checks.dp_ranks import NO_COUNTERS
from entrypoint.smoke.prompts import shape
from entrypoint.smoke.scoring import Answer, Yardstick, distance
from entrypoint.smoke.series import ByRank, Series
from patches.serving_gate.plan import MP_CONNECTOR, is_lmcache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from patches.serving_gate.plan import SmokePlan

__all__ = ["CHECK", "external_reason", "prefix_reason"]

# Seconds to let LMCache finish storing before each look; a miss is tried again with a prompt of its own.
STORE_WAITS_S = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)

# Without counters nobody sees whether LMCache answered, so it gets time to store before the one look that counts.
UNCOUNTED_WAIT_S = 1.0

_MUTE = (
    "this model's answers move by {:.1g} nats when the cached tokens are others: wrong bytes would not show in them."
    " kv_round_trip compares the bytes themselves"
)

_CACHE_HINT = "The KV cache gives back other values than were computed. Do not serve: keep the logs and the verdict."


def applies(plan: SmokePlan) -> str | None:
    if plan.level == "quick":
        return "SPLINT_SMOKE=quick leaves it out"
    if reason := chatting.applies(plan):
        return reason
    if not plan.extensions:
        return NO_EXTENSIONS
    if shape(plan) is None:
        return f"the context length of {plan.max_model_len} tokens has no room for a block of {plan.block_size}"
    return None


def prefix_reason(plan: SmokePlan) -> str | None:
    """Why no prefix-cache hit can be expected, or None."""
    return None if plan.prefix_caching else "prefix caching is off"


def chunking_reason(plan: SmokePlan) -> str | None:
    """Why the scheduler can't be made to cut a prefill into blocks, or None."""
    return probing.applies(plan) or (None if plan.chunked_prefill else "chunked prefill is off")


def external_reason(context: Context) -> str | None:
    """Why no hit in LMCache can be expected, or None."""
    plan, room = context.plan, shape(context.plan)
    if plan.chunk_tokens is None:
        return _no_chunks(plan)
    if plan.kv_role != "kv_both":
        return f"the role {plan.kv_role} does not both store and load"
    if room is None or room.cached < plan.chunk_tokens:
        return f"the context length of {plan.max_model_len} has no room for an LMCache chunk of {plan.chunk_tokens}"
    if len(plan.dp_ranks) == 1 and plan.prefix_caching and not context.secret_passes:
        return "with one rank the prefix cache must be emptied first, which only a closed gate allows"
    return None


def _no_chunks(plan: SmokePlan) -> str:
    """Why there are no chunks of a known size, without which no hit in LMCache can be asked for."""
    if plan.connector is None:
        return "no KV connector is configured"
    if not any(map(is_lmcache, plan.connectors)):
        return f"LMCache is not in the KV connector, {plan.connector}"
    if MP_CONNECTOR in plan.connectors:
        return "lmcache_availability, which tells LMCache's chunk size, is left out (SPLINT_PATCHES)"
    return f"{plan.connector} keeps its chunks inside each engine and tells nobody how long they are"


def run(context: Context) -> Evidence:
    room = shape(context.plan)
    if room is None:
        raise DoesNotApplyError(f"the context length of {context.plan.max_model_len} tokens is too short")
    return _Comparison(Series(context, room, counted=bool(context.server.counters()))).run()


class _Comparison:
    """The runs of the series in order, each held against the cold one; evidence gathers on the way."""

    def __init__(self, series: Series) -> None:
        self.series = series
        self.context = series.context
        self.evidence: Evidence = {"prompt_tokens": series.shape.cached + series.shape.tail}
        if not series.counted:
            self.evidence["hits"] = NO_COUNTERS

    def run(self) -> Evidence:
        try:
            self._run()
        except CheckFailedError as failure:
            failure.evidence = {**self.evidence, **failure.evidence}
            raise
        return self.evidence

    def _run(self) -> None:
        prompts = self.series.prompts()
        cold = self._cold(prompts)
        warm = self._prefix(prompts)
        chunked = self._chunked(prompts, cold)
        self.yardstick = self._yardstick(prompts, cold, chunked)
        self._decoded(prompts, cold)
        if warm is not None:
            self._same("prefix_hit", cold, warm, self.yardstick.tolerance)
        self._within(f"chunked prefill on DP rank {self.series.ranks[0]}", chunked, self.yardstick.tolerance)
        self._external(prompts, cold, warm)
        if not self.yardstick.tells:
            raise DoesNotApplyError(_MUTE.format(self.yardstick.signal), self.evidence)

    def _cold(self, prompts: Mapping[int, list[int]]) -> ByRank:
        answers, hits = self.series.phase(prompts)
        if hits is None:
            return answers
        for rank in prompts:
            found = hits.prefix[rank] + hits.external[rank]
            if found:
                raise CheckFailedError(
                    f"{found} cached tokens on DP rank {rank} for a random prompt that was never sent before",
                    "none",
                    "A cache takes one prompt for another. Do not serve: keep the logs and the verdict.",
                    {"cold_hits": hits.evidence()},
                )
        return answers

    def _prefix(self, prompts: Mapping[int, list[int]]) -> ByRank | None:
        if reason := prefix_reason(self.context.plan):
            self.evidence["prefix_hit"] = {"skipped": reason}
            return None
        answers, hits = self.series.phase(prompts)
        if hits is None:
            return answers
        self.evidence["prefix_hit_tokens"] = hits.evidence()["prefix"]
        for rank, tokens in hits.prefix.items():
            if tokens < self.context.plan.block_size:
                raise CheckFailedError(
                    f"{tokens} tokens from the prefix cache of DP rank {rank} for a prompt sent there before",
                    f"at least one block of {self.context.plan.block_size}",
                    "The prefix cache keeps nothing: look at the KV cache size in the engine's log.",
                )
        return answers

    def _chunked(self, prompts: Mapping[int, list[int]], cold: ByRank) -> float:
        """How far the first rank's answer moves when its prefill is cut into blocks; 0 where it can't be cut."""
        if reason := chunking_reason(self.context.plan):
            self.evidence["chunked"] = {"skipped": reason}
            return 0.0
        first = self.series.ranks[0]
        self.evidence["chunked"] = difference = self.series.chunked(prompts[first], cold[first])
        return difference

    def _yardstick(self, prompts: Mapping[int, list[int]], cold: ByRank, chunked: float) -> Yardstick:
        first = self.series.ranks[0]
        yardstick = self.series.yardstick(prompts[first], cold[first]).widened(chunked)
        self.evidence |= {
            "noise": yardstick.noise,
            "signal": yardstick.signal,
            "tolerance": yardstick.tolerance,
            "same_bytes_tolerance": yardstick.same_bytes_tolerance,
        }
        if yardstick.tells and not yardstick.steady:
            raise CheckFailedError(
                f"log-probabilities {yardstick.noise:.4g} nats apart in cold runs of one prompt",
                f"at most {yardstick.signal / 2:.4g}, half of what another prompt makes",
                "The engine's answers are not its prompts' even without a cache hit. Do not serve: keep the logs.",
            )
        return yardstick

    def _decoded(self, prompts: Mapping[int, list[int]], cold: ByRank) -> None:
        differences = self.series.rescored(prompts, cold)
        self.evidence["decode"] = {str(rank): value for rank, value in differences.items()}
        for rank, difference in differences.items():
            self._within(f"the last decoded step on DP rank {rank}", difference, self.yardstick.tolerance)

    def _same(self, name: str, wanted: ByRank, found: ByRank, tolerance: float) -> None:
        differences = {rank: distance(wanted[rank], found[rank]) for rank in found}
        self.evidence[name] = {str(rank): value for rank, value in differences.items()}
        for rank, difference in differences.items():
            self._within(f"{name} on DP rank {rank}", difference, tolerance)
            self._no_flip(name, rank, wanted[rank], found[rank])

    def _within(self, what: str, difference: float, tolerance: float) -> None:
        # Not "difference > tolerance": that is false for NaN.
        if self.yardstick.tells and not difference <= tolerance:
            raise CheckFailedError(
                f"log-probabilities {difference:.4g} nats away from the recomputed ones ({what})",
                f"at most {tolerance:.4g}, by this server's own noise of {self.yardstick.noise:.4g}",
                _CACHE_HINT,
            )

    def _no_flip(self, name: str, rank: int, wanted: Answer, found: Answer) -> None:
        step = self.yardstick.flipped(wanted, found) if self.yardstick.tells else None
        if step is not None:
            raise CheckFailedError(
                f"token {found.tokens[step]} at step {step + 1} ({name} on DP rank {rank})",
                f"token {wanted.tokens[step]}, which leads by {wanted.margin(step):.4g} nats",
                _CACHE_HINT,
            )

    def _external(self, prompts: Mapping[int, list[int]], cold: ByRank, warm: ByRank | None) -> None:
        if reason := external_reason(self.context):
            self.evidence["external_hit"] = {"skipped": reason}
            return
        wanted, found = self._external_run(prompts, warm or cold)
        same_bytes = warm is not None and self.series.counted
        tolerance = self.yardstick.same_bytes_tolerance if same_bytes else self.yardstick.tolerance
        self._same("external_hit", wanted, found, tolerance)

    def _external_run(self, prompts: Mapping[int, list[int]], wanted: ByRank) -> tuple[ByRank, ByRank]:
        """Ask each rank for what its neighbour has stored, until LMCache answers; both answers by asked rank.

        A prompt that missed is in the asked rank's own prefix cache from then on, so each try needs new ones.
        """
        for attempt, wait in enumerate(STORE_WAITS_S):
            if attempt:
                prompts, wanted = self._stored_again()
            time.sleep(wait)
            self._empty_prefix_cache()
            asked = self.series.neighbours(prompts)
            found, hits = self.series.phase(asked)
            if hits is None and wait < UNCOUNTED_WAIT_S:
                continue
            if hits is None:
                return self.series.neighbours(wanted), found
            self.evidence["external_hit_tokens"] = hits.evidence()["external"]
            self.evidence["external_attempts"] = attempt + 1
            if all(tokens >= (self.context.plan.chunk_tokens or 1) for tokens in hits.external.values()):
                return self.series.neighbours(wanted), found
        raise CheckFailedError(
            f"{self.evidence['external_hit_tokens']} tokens from LMCache by DP rank, in {len(STORE_WAITS_S)} tries",
            f"at least one chunk of {self.context.plan.chunk_tokens} on each, stored moments before",
            "Look in the logs of the engine and of lmcache server for errors while storing or loading.",
        )

    def _stored_again(self) -> tuple[dict[int, list[int]], ByRank]:
        prompts = self.series.prompts()
        answers, _ = self.series.phase(prompts)
        if self.context.plan.prefix_caching:
            answers, _ = self.series.phase(prompts)
        return prompts, answers

    def _empty_prefix_cache(self) -> None:
        """With one rank there is no neighbour to ask, so the rank must forget what it computed."""
        if len(self.series.ranks) > 1 or not self.context.plan.prefix_caching:
            return
        if not self.context.server.reset_prefix_cache():
            raise CheckFailedError(
                "a prefix cache that could not be emptied",
                "an empty one, so that only LMCache can answer",
                "Look for requests that are stuck in the engine.",
            )


CHECK = Check(
    "kv_series",
    "What the KV caches give back is what a cold run computes: decoded, from the prefix cache, from LMCache.",
    applies,
    run,
    share=0.6,
)
