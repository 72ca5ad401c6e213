"""Log-probabilities of many prompts through the completions API, and how far two runs of them lie apart."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile

import httpx

Prompt = tuple[int, ...]

VOCABULARY = 512
LENGTHS = (
    1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 23, 31, 32, 33, 40, 47, 55, 63, 64, 65, 72, 80, 88, 96, 100, 111, 119, 127,
    128, 129, 140, 155, 170, 190, 200, 224, 250, 255, 256, 257, 280, 310, 350, 383, 384, 385, 420, 460, 511, 512, 513,
    600, 700, 768, 800, 900,
)  # fmt: skip
"""Tokens: around the block of 128, and everything between one token and a few blocks."""

GENERATED_TOKENS = 8


@dataclass(frozen=True)
class Scores:
    """What one request returned: log-probabilities of the prompt, whose first token has none, and of greedy tokens."""

    prompt: tuple[float, ...]
    tokens: tuple[int, ...]
    generated: tuple[float, ...]


def make_prompts(seed: int = 0) -> list[Prompt]:
    """One prompt of random token ids for each of :data:`LENGTHS`, in a shuffled order."""
    source = random.Random(seed)
    lengths = list(LENGTHS)
    source.shuffle(lengths)
    return [tuple(source.randrange(3, VOCABULARY) for _ in range(length)) for length in lengths]


def score(client: httpx.Client, prompt: Prompt, *, rank: int | None = None) -> Scores:
    """Send one prompt, to data-parallel rank ``rank`` if given."""
    response = client.post(
        "/v1/completions",
        json={
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": GENERATED_TOKENS,
            "temperature": 0,
            "logprobs": 0,
            "prompt_logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        headers={} if rank is None else {"X-data-parallel-rank": str(rank)},
    )
    response.raise_for_status()
    choice = response.json()["choices"][0]
    positions = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
    return Scores(
        tuple(position[str(token)]["logprob"] for token, position in positions),
        tuple(choice["token_ids"]),
        tuple(choice["logprobs"]["token_logprobs"]),
    )


def score_all(
    base_url: str, prompts: Sequence[Prompt], *, concurrency: int = 1, ranks: Sequence[int | None] = (None,)
) -> list[Scores]:
    """Scores of all prompts, ``concurrency`` requests at a time; request ``i`` goes to ``ranks[i % len(ranks)]``."""
    with httpx.Client(base_url=base_url, timeout=120) as client, ThreadPoolExecutor(concurrency) as pool:
        jobs = [pool.submit(score, client, prompt, rank=ranks[i % len(ranks)]) for i, prompt in enumerate(prompts)]
        return [job.result() for job in jobs]


def distance(one: Scores, other: Scores) -> float:
    """The largest difference of two log-probabilities in nats, over all positions with the same tokens before them.

    Greedy runs part where two tokens tie; the position of the parting still counts, later ones have other contexts.
    """
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one.tokens, other.tokens, strict=True))))
    generated = zip(one.generated[: same + 1], other.generated[: same + 1], strict=True)
    pairs = [*zip(one.prompt, other.prompt, strict=True), *generated]
    return max(abs(a - b) for a, b in pairs)


def distances(ones: Sequence[Scores], others: Sequence[Scores]) -> list[float]:
    """:func:`distance` for each prompt."""
    return [distance(one, other) for one, other in zip(ones, others, strict=True)]


def root_mean_square(ones: Sequence[Scores], others: Sequence[Scores]) -> float:
    """Root mean square of the differences on the given tokens, in nats."""
    differences = [
        a - b for one, other in zip(ones, others, strict=True) for a, b in zip(one.prompt, other.prompt, strict=True)
    ]
    return math.sqrt(sum(difference**2 for difference in differences) / len(differences))
