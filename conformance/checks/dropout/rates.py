"""Statistics of kept weights: their rate along each axis, and whether places are independent of each other.

Each comparison counts successes of independent trials. By Chernoff's bound, n trials of probability p have a
share f of successes, or one further off on the same side, with a probability of at most exp(-n KL(f, p)).
KL(f, p) = f log(f / p) + (1 - f) log((1 - f) / (1 - p)).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import log

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]

AXES = ("seed", "batch entry", "head", "row", "key")


@dataclass(frozen=True)
class Count:
    """Some successes of so many independent trials, each of one probability; what they are, for a message."""

    what: str
    successes: int
    trials: int
    probability: float

    @property
    def exponent(self) -> float:
        """The exponent of the bound on the probability of so many successes, n KL(f, p)."""
        p, total = self.probability, 0.0
        for count, share in ((self.successes, p), (self.trials - self.successes, 1 - p)):
            total += count * log(count / (self.trials * share)) if count else 0.0
        return total

    def __str__(self) -> str:
        """Return the count in words."""
        return f"{self.what} {self.successes} of {self.trials}, expected {self.probability:.4g} of them"


def improbable(kept: Bools, seen: Bools, rate: float, false_alarm: float) -> list[Count]:
    """Return the counts that are improbable of independent weights, each dropped with probability `rate`.

    kept, seen: bool [seed, batch, head, row, key]; pairs that are not seen do not count. false_alarm: the
    probability that there is any count for a right generator. The rate of all weights comes first, then the
    least probable count.
    """
    counts = [count for count in (*_rates(kept, seen, rate), *_pairs(kept, seen, rate)) if count.trials]
    limit = log(2 * max(len(counts), 1) / false_alarm)
    wrong = [count for count in counts if count.exponent > limit]
    return sorted(wrong, key=lambda count: (count is not counts[0], -count.exponent))


def _rates(kept: Bools, seen: Bools, rate: float) -> Iterator[Count]:
    """Yield the kept weights of all, and of each place along each axis."""
    yield Count("dropout keeps", int((kept & seen).sum()), int(seen.sum()), 1 - rate)
    for axis, name in enumerate(AXES):
        others = tuple(other for other in range(len(AXES)) if other != axis)
        held, trials = (kept & seen).sum(axis=others), seen.sum(axis=others)
        for place in range(len(held)) if len(held) > 1 else ():
            yield Count(f"in {name} {place} dropout keeps", int(held[place]), int(trials[place]), 1 - rate)


def _pairs(kept: Bools, seen: Bools, rate: float) -> Iterator[Count]:
    """Yield the agreements between places that are some steps apart along one axis, or one step along two.

    No place is in two pairs of a count, so that its pairs are independent.
    """
    for axis, name in enumerate(AXES):
        for steps in range(1, kept.shape[axis]):
            plural = f"{name}s" if name != "batch entry" else "batch entries"
            what = f"{plural} {steps} apart drop alike in"
            yield from _agreements(what, kept, seen, rate, {axis: steps})
    for first, second in combinations(range(len(AXES)), 2):
        for steps in (1, -1):
            what = f"a {AXES[first]} and the next one, {steps:+d} {AXES[second]}, drop alike in"
            yield from _agreements(what, kept, seen, rate, {first: 1, second: steps})


def _agreements(what: str, kept: Bools, seen: Bools, rate: float, steps: dict[int, int]) -> Iterator[Count]:
    """Yield the agreements of all pairs with these steps between them, by whether the first place is even."""
    axis, step = next(iter(steps.items()))
    here, there = [slice(None)] * kept.ndim, [slice(None)] * kept.ndim
    for along, by in steps.items():
        size = kept.shape[along]
        low, high = slice(0, max(size - abs(by), 0)), slice(abs(by), size)
        here[along], there[along] = (low, high) if by > 0 else (high, low)
    both = seen[tuple(here)] & seen[tuple(there)]
    alike = (kept[tuple(here)] == kept[tuple(there)]) & both
    for parity in (0, 1):
        places = np.flatnonzero(np.arange(both.shape[axis]) // step % 2 == parity)
        held, trials = (int(array.take(places, axis).sum()) for array in (alike, both))
        yield Count(what, held, trials, rate**2 + (1 - rate) ** 2)
