"""The runs behind the KV series: what is asked of which rank, and what its counters said meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from entrypoint.smoke.ask import complete
from entrypoint.smoke.check import CheckFailedError, Context
from entrypoint.smoke.counters import EXTERNAL_HITS, PREFIX_HITS, REQUESTS, Counters
from entrypoint.smoke.probing import ask
from entrypoint.smoke.prompts import Shape, Tokens
from entrypoint.smoke.scoring import Answer, Yardstick, distance, spread
from patches.kv_probe import WHOLE

__all__ = ["Hits", "Series"]

MAX_PARALLEL = 32
COMPANIONS = 2

ByRank = dict[int, Answer]
Job = tuple[int, list[int], int, str | None]
Prompts = Mapping[int, list[int]]


@dataclass(frozen=True)
class Hits:
    """Prompt tokens of one phase that each rank found in its own prefix cache and in the external one."""

    prefix: dict[int, int]
    external: dict[int, int]

    def evidence(self) -> dict[str, dict[str, int]]:
        """The same for JSON, whose keys are text."""
        return {
            "prefix": {str(rank): tokens for rank, tokens in self.prefix.items()},
            "external": {str(rank): tokens for rank, tokens in self.external.items()},
        }


@dataclass
class Series:
    """Asks the ranks of one server, all at once in each phase, so that a phase costs what one request costs.

    ``counted`` is False where the server publishes no engine counters: then answers are compared, hits not counted.
    """

    context: Context
    shape: Shape
    counted: bool = True
    tokens: Tokens = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = Tokens(self.context.plan.vocab_size)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The data-parallel ranks that the server owns."""
        return self.context.plan.dp_ranks

    def prompts(self) -> dict[int, list[int]]:
        """A prompt for each rank that no cache has seen."""
        return {rank: self.tokens.prompt(self.shape.cached + self.shape.tail) for rank in self.ranks}

    def _complete(self, rank: int, prompt: list[int], length: int, salt: str | None) -> Answer:
        answer = complete(self.context.server, prompt, length, self.context.plan.address(rank), salt)
        if len(answer.tokens) != length or len(answer.top) != length:
            raise CheckFailedError(
                f"{len(answer.tokens)} tokens from DP rank {rank}",
                f"{length} with their log-probabilities",
                f"Look for errors in the log of engine {rank}.",
            )
        return answer

    def _together(self, jobs: Sequence[Job]) -> list[Answer]:
        with ThreadPoolExecutor(min(len(jobs), MAX_PARALLEL)) as pool:
            return list(pool.map(lambda job: self._complete(*job), jobs))

    def phase(self, prompts: Prompts) -> tuple[ByRank, Hits | None]:
        """Send each rank its prompt and read what its caches did; None where the server does not count."""
        if not self.counted:
            return self._answers(prompts), None
        server = self.context.server
        before = server.counters()
        answers = self._answers(prompts)
        after = server.counters_once(lambda now: all(now.moved(before, REQUESTS, rank) for rank in prompts))
        return answers, _hits(before, after, prompts)

    def _answers(self, prompts: Prompts) -> ByRank:
        length = self.context.plan.generated
        answers = self._together([(rank, prompt, length, None) for rank, prompt in prompts.items()])
        return dict(zip(prompts, answers, strict=True))

    def yardstick(self, prompt: list[int], cold: Answer) -> Yardstick:
        """Repeat a cold run alone and in company, and replace the part of the prompt that caches hold.

        Raises:
            CheckFailedError: the server gave no usable answer.
        """
        rank = self.ranks[0]
        length = self.context.plan.generated
        alone = self._complete(rank, prompt, length, self.tokens.salt())
        others = [self.tokens.prompt(self.shape.cached) + prompt[self.shape.cached :] for _ in range(COMPANIONS)]
        beside, *foreign = self._together([(rank, ids, length, self.tokens.salt()) for ids in (prompt, *others)])
        noise = max(distance(cold, alone), distance(cold, beside), distance(alone, beside))
        return Yardstick(noise, fmean(spread(cold.top[0], answer.top[0]) for answer in foreign))

    def chunked(self, prompt: list[int], cold: Answer) -> float:
        """How far the first rank's answer moves when its prompt is prefilled block by block, in nats.

        Raises:
            CheckFailedError: the engines do not chunk, or gave no usable answer.
        """
        ask(self.context, "prefill_in_blocks")
        try:
            answer = self._complete(self.ranks[0], prompt, self.context.plan.generated, self.tokens.salt())
        finally:
            ask(self.context, WHOLE)
        return distance(cold, answer)

    def rescored(self, prompts: Prompts, cold: ByRank) -> dict[int, float]:
        """How far each rank's last decoded step is from the same step computed by prefilling everything before it.

        Decoding reads the KV cache of all earlier tokens; the prefill of a prompt that no cache knows computes them.
        """
        jobs = [(rank, [*prompt, *cold[rank].tokens[:-1]], 1, self.tokens.salt()) for rank, prompt in prompts.items()]
        answers = self._together(jobs)
        return {rank: spread(cold[rank].top[-1], answer.top[0]) for rank, answer in zip(prompts, answers, strict=True)}

    def neighbours(self, by_rank: Mapping[int, Any]) -> dict[int, Any]:
        """The same values, each moved on to the next rank of the ring."""
        ranks = self.ranks
        return {ranks[(index + 1) % len(ranks)]: by_rank[rank] for index, rank in enumerate(ranks)}


def _hits(before: Counters, after: Counters, ranks: Prompts) -> Hits:
    def moved(family: str) -> dict[int, int]:
        return {rank: after.moved(before, family, rank) for rank in ranks}

    return Hits(moved(PREFIX_HITS), moved(EXTERNAL_HITS))
