"""Thresholds of a comparison: the slack of compare.toml, by scope and statistic."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CASE = "case"
SAME_CASES = "same_cases"
OTHER_CASES = "other_cases"
SCOPES = (CASE, SAME_CASES, OTHER_CASES)


@dataclass(frozen=True)
class Limit:
    """One entry of compare.toml, which says what each field means."""

    relative: float
    absolute: float
    elements: int
    reason: str
    results: int = 1
    keys: int = 0
    floor: float = 0.0

    def of(self, before: float, other_blocks: bool) -> float:
        """Return the largest number that is not worse than `before`; other_blocks: of other block sizes."""
        limit = self.slackened(before)
        return max(limit, self.floor) if other_blocks else limit

    def slackened[T: (float, NDArray[np.float64])](self, before: T) -> T:
        """Return the same for equal block sizes, of one number or of an array."""
        return before * (1.0 + self.relative) + self.absolute

    def exceeded(self, before: float, after: float, other_blocks: bool) -> bool:
        """Return whether `after` is worse; NaN and inf are equal, and worse than any number."""
        before, after = badness(before), badness(after)
        return after > before if math.isinf(after) else after > self.of(before, other_blocks)


def badness(statistic: float) -> float:
    """Return how bad a statistic is, at least 0: without its sign, and NaN is as bad as inf."""
    return math.inf if math.isnan(statistic) else abs(statistic)


@cache
def limits(scope: str) -> Mapping[str, Limit]:
    """Return the limits of one of SCOPES, by statistic."""
    data = tomllib.loads((Path(__file__).parent / "compare.toml").read_text())
    return {statistic: Limit(**entry) for statistic, entry in data[scope].items()}
