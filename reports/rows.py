"""The numbers of two runs beside each other: by feature over many cases, and case by case."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from attest.reports.pairing import Pair
from attest.reports.spread import Column, Key, Samples, Spread, spread_of
from attest.reports.thresholds import CASE, OTHER_CASES, SAME_CASES, Limit, badness, limits
from attest.reports.words import STATISTIC_WORDS

ALL = "all"


@dataclass(frozen=True)
class Row:
    """One output of one check in one dtype over the cases that have a feature, before and after.

    feature: of `attest.conformance.cases.features.FEATURES`, or ALL. scope: whether both runs measured the
    same cases. worse, better: of STATISTICS.
    """

    subject: str
    check: str
    dtype: str
    feature: str
    output: str
    base: Spread | None
    head: Spread | None
    scope: str
    other_blocks: bool = False
    worse: tuple[str, ...] = ()
    better: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """The order of rows; ALL before any feature."""
        return (
            self.subject,
            self.check,
            self.dtype,
            self.output,
            "" if self.feature == ALL else self.feature,
        )

    @property
    def severity(self) -> float:
        """The factor by which the worst statistic exceeds its limit; 0 where none does."""
        chosen = limits(self.scope)
        return max(
            (_excess(chosen[s], *_values(self, s), self.other_blocks) for s in self.worse), default=0.0
        )


@dataclass(frozen=True)
class Shift:
    """One statistic of one output that became worse on one case."""

    pair: Pair
    output: str
    statistic: str
    before: float
    after: float

    @property
    def name(self) -> str:
        """The statistic in words."""
        return STATISTIC_WORDS[self.statistic].removeprefix("max ")

    @property
    def severity(self) -> float:
        """The factor by which the limit is exceeded."""
        return _excess(limits(CASE)[self.statistic], self.before, self.after, self.pair.other_blocks)


def rows(before: Mapping[Key, Samples], after: Mapping[Key, Samples], other_blocks: bool) -> list[Row]:
    """Return every row of either run, in order; other_blocks: they have other block sizes."""
    found: list[Row] = []
    for key in before.keys() | after.keys():
        base, head = (_Side(run[key]) if key in run else None for run in (before, after))
        features = {feature for side in (base, head) if side is not None for feature in side.members}
        found += [_row(key, feature, base, head, other_blocks) for feature in features]
    return sorted(found, key=lambda row: row.key)


def row_of_all(key: Key, before: Samples, after: Samples, other_blocks: bool) -> Row:
    """Return the row over all cases of an output."""
    return _row(key, ALL, _Side(before), _Side(after), other_blocks)


def main_rows(found: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows to show first: those over all cases, and a feature's where only it became worse."""
    both = [row for row in found if row.base and row.head]
    told = {(row.key[:4], name) for row in both if row.feature == ALL for name in row.worse}
    chosen = [row for row in both if row.feature == ALL or {(row.key[:4], n) for n in row.worse} - told]
    return tuple(sorted(chosen, key=lambda row: (-row.severity, row.key)))


def shifts(
    before: Mapping[Key, Samples],
    after: Mapping[Key, Samples],
    other_blocks: bool,
    pair_of: Callable[[str], Pair],
) -> list[Shift]:
    """Return whatever became worse on a case that both runs measured.

    other_blocks: they have other block sizes. pair_of: returns the pair of a case by its id.
    """
    return [
        Shift(pair_of(case), key[-1], statistic, old, new)
        for key in sorted(before.keys() & after.keys())
        for case, statistic, old, new in _shifted(before[key], after[key])
        if limits(CASE)[statistic].exceeded(old, new, other_blocks)
    ]


def _shifted(before: Samples, after: Samples) -> Iterable[tuple[str, str, float, float]]:
    """Yield case, statistic and both numbers of what became worse, if the block sizes are the same."""
    place = {case: number for number, case in enumerate(before.cases)}
    both = [(place[case], number) for number, case in enumerate(after.cases) if case in place]
    old_rows, new_rows = np.array(both, np.intp).reshape(-1, 2).T
    for statistic, limit in limits(CASE).items():
        old = np.nan_to_num(before.column(statistic, limit)[old_rows], nan=0.0, posinf=math.inf)
        new = after.column(statistic, limit)[new_rows]
        most = np.where(np.isinf(new), old, limit.slackened(old))
        for number in np.flatnonzero(new > most).tolist():
            yield after.cases[both[number][1]][0], statistic, float(old[number]), float(new[number])


class _Side:
    """The samples of an output in one run. members: which of them have a feature, or are of ALL."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        members: defaultdict[str, list[int]] = defaultdict(list)
        for number, features in enumerate(samples.features):
            for feature in (ALL, *features):
                members[feature].append(number)
        self.members = dict(members)
        self._values: dict[str, Column] = {}

    def cases(self, feature: str) -> set[tuple[str, int]]:
        """Return the measurements of the cases that have a feature."""
        return {self.samples.cases[number] for number in self.members.get(feature, ())}

    def spread(self, feature: str, scope: str) -> Spread | None:
        """Return the statistics of the cases that have a feature; None if there is none."""
        if feature not in self.members:
            return None
        if scope not in self._values:
            self._values[scope] = self.samples.values(scope)
        return spread_of(self._values[scope][:, self.members[feature]])


def _row(key: Key, feature: str, before: _Side | None, after: _Side | None, other_blocks: bool) -> Row:
    subject, check, dtype, output = key
    scope = SAME_CASES if _same_cases(feature, before, after) else OTHER_CASES
    base = before and before.spread(feature, scope)
    head = after and after.spread(feature, scope)
    return Row(
        subject,
        check,
        dtype,
        feature,
        output,
        base=base,
        head=head,
        scope=scope,
        other_blocks=other_blocks,
        worse=_worse(base, head, scope, other_blocks),
        better=_worse(head, base, scope, other_blocks),
    )


def _same_cases(feature: str, before: _Side | None, after: _Side | None) -> bool:
    if before is None or after is None:
        return False
    same = before.samples.cases == after.samples.cases
    return same or before.cases(feature) == after.cases(feature)


def _worse(before: Spread | None, after: Spread | None, scope: str, other_blocks: bool) -> tuple[str, ...]:
    if before is None or after is None:
        return ()
    return tuple(s for s, limit in limits(scope).items() if _is_worse(before, after, s, limit, other_blocks))


def _is_worse(before: Spread, after: Spread, statistic: str, limit: Limit, other_blocks: bool) -> bool:
    old, new = getattr(before, statistic), getattr(after, statistic)
    if new is None:
        return False
    if new == math.inf:
        return old is None or old < new
    enough = min(dict(side.counted)[statistic] for side in (before, after)) >= limit.results
    return old is not None and enough and limit.exceeded(old, new, other_blocks)


def _values(row: Row, statistic: str) -> tuple[float, float]:
    before, after = (getattr(side, statistic, None) for side in (row.base, row.head))
    return (before or 0.0, after or 0.0)


def _excess(limit: Limit, before: float, after: float, other_blocks: bool) -> float:
    return badness(after) / limit.of(badness(before), other_blocks) if badness(before) < math.inf else 0.0
