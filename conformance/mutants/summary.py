"""Totals of scores: how many mutants were killed, by class, by check and by profile, with intervals."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from attest.conformance.mutants.verdict import Score

_Z = 1.959964  # of the normal distribution: two sides of 95 %


@dataclass(frozen=True)
class Totals:
    """Mutants that a profile was asked to find.

    killed: with every seed that they were scored with. survived: the names of the others, with those seeds.
    null_killed: names of correct rewrites for which something was red. by_class, by_subject: (killed, all).
    """

    profile: str
    seeds: tuple[int, ...]
    total: int
    killed: int
    survived: Mapping[str, tuple[int, ...]]
    null_total: int
    null_killed: tuple[str, ...]
    low: float
    high: float
    by_class: Mapping[str, tuple[int, int]]
    by_subject: Mapping[str, tuple[int, int]]
    by_check: Mapping[str, int]
    by_how: Mapping[str, int]
    median_results: int


def totals(scores: Iterable[Score]) -> list[Totals]:
    """Return the totals of each profile."""
    profiles: dict[str, list[Score]] = {}
    for score in scores:
        profiles.setdefault(score.profile, []).append(score)
    return [_totals(name, profiles[name]) for name in sorted(profiles)]


def _totals(profile: str, scores: Sequence[Score]) -> Totals:
    defects: dict[str, list[Score]] = {}
    for score in scores:
        if not score.null:
            defects.setdefault(score.name, []).append(score)
    survived = {
        name: seeds
        for name, of_name in sorted(defects.items())
        if (seeds := tuple(sorted(score.seed for score in of_name if not score.killed)))
    }
    killed = len(defects) - len(survived)
    low, high = interval(killed, len(defects))
    kills = [score for of_name in defects.values() for score in of_name if score.killed]
    results = sorted(score.results for score in kills)
    return Totals(
        profile=profile,
        seeds=tuple(sorted({score.seed for score in scores})),
        total=len(defects),
        killed=killed,
        survived=survived,
        null_total=len({score.name for score in scores if score.null}),
        null_killed=tuple(sorted({score.name for score in scores if score.null and score.killed})),
        low=low,
        high=high,
        by_class=_shares(defects, survived, lambda score: score.defect_class),
        by_subject=_shares(defects, survived, lambda score: score.subject),
        by_check=dict(sorted(Counter(score.check for score in kills).items())),
        by_how=dict(sorted(Counter(str(score.how) for score in kills).items())),
        median_results=results[len(results) // 2] if results else 0,
    )


def lost(scores: Iterable[Score], kills: Mapping[str, Mapping[str, Mapping[str, object]]]) -> list[str]:
    """Return the names of the survivors that the same profile and seed killed when the scores were last made.

    kills: by name, profile and seed.
    """
    survivors = [score for score in scores if not score.killed]
    return sorted(
        {
            score.name
            for score in survivors
            if str(score.seed) in kills.get(score.name, {}).get(score.profile, {})
        }
    )


def _shares(
    defects: Mapping[str, Sequence[Score]], survived: Mapping[str, object], of: Callable[[Score], str]
) -> dict[str, tuple[int, int]]:
    """Return (killed, all) mutants by what `of` says of a score, without those of which it says nothing."""
    found: dict[str, tuple[int, int]] = {}
    for name, (score, *_) in defects.items():
        if key := of(score):
            killed, every = found.get(key, (0, 0))
            found[key] = (killed + (name not in survived), every + 1)
    return dict(sorted(found.items()))


def interval(killed: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, after Wilson (1927); (0, 1) of nothing."""
    if total == 0:
        return 0.0, 1.0
    share, weight = killed / total, _Z * _Z / total
    middle = (share + weight / 2) / (1 + weight)
    half = _Z * sqrt(share * (1 - share) / total + weight / (4 * total)) / (1 + weight)
    # Rounding must not leave the share itself outside.
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))
