"""When are two answers the same answer? Pure arithmetic on log-probabilities.

Two runs of the same prompt differ in the last bits whenever the batch has another shape, so equality is the wrong
question. The yardstick comes from the server itself: ``noise`` is how far cold runs of one prompt differ, alone, in
company and with its prefill cut into chunks,
``signal`` how far the answer moves when the cached part of the prompt is replaced by other tokens. A cache that works
stays near the noise; one with foreign bytes comes out near the signal, whatever the scale of the model's logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

__all__ = ["Answer", "Yardstick", "distance", "spread"]

NOISE_FACTOR = 4.0
SIGNAL_SHARE = 8.0
SAME_BYTES_SHARE = 50.0
LEAST_SIGNAL = 1e-4

Distribution = dict[int, float]


@dataclass(frozen=True)
class Answer:
    """A greedy continuation.

    Attributes:
        tokens: Token ids, one a step.
        top: For each step the log-probabilities (nats) of the most likely tokens, by token id.
    """

    tokens: tuple[int, ...]
    top: tuple[Distribution, ...]

    def margin(self, step: int) -> float:
        """How far the best token leads the second at ``step``, in nats; infinite where only one was returned."""
        best = sorted(self.top[step].values(), reverse=True)[:2]
        return best[0] - best[1] if len(best) > 1 else math.inf


def _value(distribution: Distribution, token: int, elsewhere: Distribution) -> float:
    """The token's log-probability; of one that is not listed, the nearest to ``elsewhere``'s that it can have."""
    if token in distribution:
        return distribution[token]
    return min(*distribution.values(), elsewhere[token])


def spread(left: Distribution, right: Distribution) -> float:
    """Root mean square difference of two distributions over their most likely tokens, in nats.

    Where a token is on one side's list only, the difference counts as far as it is certain.
    """
    gaps = [_value(left, token, right) - _value(right, token, left) for token in left.keys() | right.keys()]
    return math.sqrt(sum(gap * gap for gap in gaps) / len(gaps))


def distance(left: Answer, right: Answer) -> float:
    """The largest :func:`spread` over the steps that had the same tokens before them, in nats."""
    steps = agreed_steps(left, right)
    return max(spread(*pair) for pair in zip(left.top[:steps], right.top[:steps], strict=True))


def agreed_steps(left: Answer, right: Answer) -> int:
    """How many steps are comparable: all up to and with the first where the tokens differ."""
    for step, (one, other) in enumerate(zip(left.tokens, right.tokens, strict=False)):
        if one != other:
            return step + 1
    return min(len(left.tokens), len(right.tokens))


@dataclass(frozen=True)
class Yardstick:
    """What this server's own runs say about differences; see the module's first paragraph. All in nats."""

    noise: float
    signal: float

    def widened(self, chunked: float) -> Yardstick:
        """With what chunking alone makes of an answer as noise, too, unless that is more than caches may do."""
        return replace(self, noise=max(self.noise, chunked)) if chunked <= self.tolerance else self

    @property
    def tolerance(self) -> float:
        """For the same prompt with and without the cache; never so wide that foreign bytes pass."""
        return min(max(NOISE_FACTOR * self.noise, self.signal / SIGNAL_SHARE), self.signal / 2)

    @property
    def same_bytes_tolerance(self) -> float:
        """For two runs that read the same cached bytes in batches of the same shape."""
        return min(max(NOISE_FACTOR * self.noise, self.signal / SAME_BYTES_SHARE), self.signal / 2)

    @property
    def tells(self) -> bool:
        """Whether foreign bytes in the cache would show: not in a model that ignores its prompt."""
        return not (self.signal < LEAST_SIGNAL and self.noise < LEAST_SIGNAL)

    @property
    def steady(self) -> bool:
        """Whether the same prompt gives about the same answer twice when no cache is in play. False for NaN."""
        return self.noise <= self.signal / 2

    def flipped(self, left: Answer, right: Answer) -> int | None:
        """The step at which the tokens differ although the margin was clear, or None."""
        step = agreed_steps(left, right) - 1
        if left.tokens[step] != right.tokens[step] and left.margin(step) > 2 * self.tolerance:
            return step
        return None
