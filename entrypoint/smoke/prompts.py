"""Prompts of token ids: random, so that no cache can know them, and long enough for the caches to hold a part."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patches.serving_gate.plan import SmokePlan

__all__ = ["Shape", "Tokens", "shape"]


@dataclass(frozen=True)
class Shape:
    """A prompt's two parts, in tokens: ``cached`` is what a later run is to find in a cache, ``tail`` follows it."""

    cached: int
    tail: int


def shape(plan: SmokePlan) -> Shape | None:
    """Two blocks and two LMCache chunks where the context length has room, at least one block, or None.

    The tail ends shortly before a block does, so that the generated tokens begin a new one.
    """
    tail = max(plan.block_size - plan.generated // 2, 1)
    chunk = math.lcm(plan.block_size, plan.chunk_tokens or plan.block_size)
    for cached in (2 * chunk, chunk, 2 * plan.block_size, plan.block_size):
        if cached + tail + plan.generated <= plan.max_model_len:
            return Shape(cached, tail)
    return None


class Tokens:
    """A source of token ids from the middle of the vocabulary: special tokens sit at its ends."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.SystemRandom()
        self._ids = range(vocab_size // 8, max(vocab_size // 2, vocab_size // 8 + 1))

    def prompt(self, length: int) -> list[int]:
        """``length`` token ids that no earlier prompt had in this order."""
        return self._random.choices(self._ids, k=length)

    def salt(self) -> str:
        """A ``cache_salt`` that no earlier request had."""
        return f"splint-{self._random.getrandbits(64):016x}"
