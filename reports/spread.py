"""Statistics of the measurements of two runs, by feature over many cases and case by case."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from attest.conformance.cases.case import Case
from attest.conformance.record import Measurement, Result, Verdict
from attest.reference import judgements
from attest.reports.pairing import Pair
from attest.reports.thresholds import CASE, OTHER_CASES, SAME_CASES, Limit, badness, limits
from attest.reports.words import STATISTIC_WORDS

ALL = "all"
STATISTICS = ("worst_ratio", "rms_ratio", "rms_median", "largest_z", "bias_t")

# A known failure would hide all others behind its numbers.
_NOT_COUNTED = (Verdict.XFAIL,)


@dataclass(frozen=True)
class Sample:
    """One measurement of a case of so many keys."""

    measurement: Measurement
    keys: int

    def value(self, statistic: str, limit: Limit) -> float | None:
        """Return a statistic without its sign; None if there is too little for it to say anything."""
        name = "rms_ratio" if statistic == "rms_median" else statistic
        value = badness(getattr(self.measurement, name))
        enough = self.measurement.elements >= limit.elements and self.keys >= limit.keys
        return value if enough or value == math.inf else None


@dataclass(frozen=True)
class Spread:
    """One output over many cases: the largest of each statistic, without its sign.

    None where no measurement had enough elements (compare.toml). results: how many measurements there are;
    counted: how many had enough elements, by statistic.
    """

    results: int
    worst_ratio: float | None
    rms_ratio: float | None
    rms_median: float | None
    largest_z: float | None
    bias_t: float | None
    counted: tuple[tuple[str, int], ...]


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


Key = tuple[str, str, str, str, str]


def rows(pairs: Iterable[Pair]) -> tuple[Row, ...]:
    """Return every row of either run, in order."""
    pairs = tuple(pairs)
    before = samples_of((p.case_id, p.base) for p in pairs)
    after = samples_of((p.case_id, p.head) for p in pairs)
    other_blocks = {pair.key[0] for pair in pairs if pair.other_blocks}
    found = [
        row_of(key, before.get(key, {}), after.get(key, {}), key[0] in other_blocks)
        for key in before.keys() | after.keys()
    ]
    return tuple(sorted(found, key=lambda row: row.key))


def main_rows(found: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows to show first: those over all cases, and a feature's where only it became worse."""
    both = [row for row in found if row.base and row.head]
    told = {(row.key[:4], name) for row in both if row.feature == ALL for name in row.worse}
    chosen = [row for row in both if row.feature == ALL or {(row.key[:4], n) for n in row.worse} - told]
    return tuple(sorted(chosen, key=lambda row: (-row.severity, row.key)))


def shifts(pairs: Iterable[Pair]) -> tuple[Shift, ...]:
    """Return whatever became worse on a case that both runs measured, the worst first."""
    found = [shift for pair in pairs for shift in _shifts(pair)]
    return tuple(sorted(found, key=lambda s: (-s.severity, s.pair.key, s.output, s.statistic)))


def spread(samples: Sequence[Sample], scope: str = OTHER_CASES) -> Spread:
    """Return the statistics of one output over many cases."""
    values: dict[str, list[float]] = {}
    for name in STATISTICS:
        found = (sample.value(name, limits(scope)[name]) for sample in samples)
        values[name] = [value for value in found if value is not None]
    largest = {name: max(found, default=None) for name, found in values.items()}
    halves = values["rms_median"]
    return Spread(
        results=len(samples),
        worst_ratio=largest["worst_ratio"],
        rms_ratio=largest["rms_ratio"],
        rms_median=median(halves) if halves else None,
        largest_z=largest["largest_z"],
        bias_t=largest["bias_t"],
        counted=tuple((name, len(values[name])) for name in STATISTICS),
    )


def spreads(results: Iterable[Result]) -> dict[Key, Spread]:
    """Return the spreads of one run, by subject, check, dtype, feature and output."""
    found = samples_of((str(number), result) for number, result in enumerate(results))
    return {key: spread(tuple(values.values())) for key, values in found.items()}


def measured(result: Result) -> tuple[Sample, ...]:
    """Return the samples of a result that count; where only the bound judges a family, only its ratio."""
    if result.verdict in _NOT_COUNTED:
        return ()
    measurements = result.measurements
    if _only_bound(result.case):
        measurements = (
            replace(m, elements=0, rms_ratio=0.0, largest_z=0.0, bias_t=0.0) for m in measurements
        )
    return tuple(Sample(measurement, result.case.kv_len) for measurement in measurements)


def _only_bound(case: Case) -> bool:
    return math.isinf(judgements.limits("out", 1, case.kv_len, case.dtype, case.family).largest_z)


def samples_of(
    results: Iterable[tuple[str, Result | None]], by_feature: bool = True
) -> dict[Key, dict[str, Sample]]:
    """Return samples by row and case, of results with the ids of their cases; or those of all cases alone."""
    found: defaultdict[Key, dict[str, Sample]] = defaultdict(dict)
    for case_id, result in results:
        if result is None:
            continue
        features = (ALL, *result.case.features) if by_feature else (ALL,)
        for sample in measured(result):
            for feature in features:
                output = sample.measurement.output
                key = (result.subject, result.check, result.case.dtype, feature, output)
                found[key][case_id] = sample
    return found


def row_of(key: Key, before: Mapping[str, Sample], after: Mapping[str, Sample], other_blocks: bool) -> Row:
    """Return one row, from the samples of both runs by case; other_blocks: they have other block sizes."""
    scope = SAME_CASES if before.keys() == after.keys() else OTHER_CASES
    base = spread(tuple(before.values()), scope) if before else None
    head = spread(tuple(after.values()), scope) if after else None
    return Row(
        *key,
        base=base,
        head=head,
        scope=scope,
        other_blocks=other_blocks,
        worse=_worse(base, head, scope, other_blocks),
        better=_worse(head, base, scope, other_blocks),
    )


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


def _shifts(pair: Pair) -> Iterable[Shift]:
    if pair.base is None or pair.head is None:
        return
    old = {sample.measurement.output: sample for sample in measured(pair.base)}
    for sample in measured(pair.head):
        output = sample.measurement.output
        for statistic, limit in limits(CASE).items() if output in old else ():
            before, after = (s.value(statistic, limit) for s in (old[output], sample))
            if after is not None and limit.exceeded(before or 0.0, after, pair.other_blocks):
                yield Shift(pair, output, statistic, before or 0.0, after)


def _values(row: Row, statistic: str) -> tuple[float, float]:
    before, after = (getattr(side, statistic, None) for side in (row.base, row.head))
    return (before or 0.0, after or 0.0)


def _excess(limit: Limit, before: float, after: float, other_blocks: bool) -> float:
    return badness(after) / limit.of(badness(before), other_blocks) if badness(before) < math.inf else 0.0
