"""How the measurements of two runs compare: by feature over many cases, and case by case."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from conformance.record import Measurement, Result, Verdict
from reports.pairing import Pair
from reports.thresholds import CASE, OTHER_CASES, SAME_CASES, Limit, badness, limits

ALL = "all"
STATISTICS = ("worst_ratio", "rms_ratio", "rms_median", "largest_z", "bias_t")

# A known failure would hide all others behind its numbers.
_NOT_COUNTED = (Verdict.XFAIL,)


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

    feature: of `conformance.features.FEATURES`, or ALL. scope: whether both runs measured the same cases.
    worse, better: of STATISTICS.
    """

    subject: str
    check: str
    dtype: str
    feature: str
    output: str
    base: Spread | None
    head: Spread | None
    scope: str
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
        """How many times the limit is exceeded by the worst statistic; 0 where none is worse."""
        chosen = limits(self.scope)
        return max((_excess(chosen[s], *_values(self, s)) for s in self.worse), default=0.0)


@dataclass(frozen=True)
class Shift:
    """One statistic of one output that became worse on one case."""

    pair: Pair
    output: str
    statistic: str
    before: float
    after: float

    @property
    def severity(self) -> float:
        """How many times the limit is exceeded."""
        return _excess(limits(CASE)[self.statistic], self.before, self.after)


Key = tuple[str, str, str, str, str]


def rows(pairs: Iterable[Pair]) -> tuple[Row, ...]:
    """Every row of either run, in order."""
    pairs = tuple(pairs)
    before = _collect((p.case_id, p.base) for p in pairs)
    after = _collect((p.case_id, p.head) for p in pairs)
    found = [_row(key, before.get(key, {}), after.get(key, {})) for key in before.keys() | after.keys()]
    return tuple(sorted(found, key=lambda row: row.key))


def shifts(pairs: Iterable[Pair]) -> tuple[Shift, ...]:
    """Whatever became worse on a case that both runs measured, the worst first."""
    found = [shift for pair in pairs for shift in _shifts(pair)]
    return tuple(sorted(found, key=lambda s: (-s.severity, s.pair.question, s.output, s.statistic)))


def spread(measurements: Sequence[Measurement], scope: str = OTHER_CASES) -> Spread:
    """The statistics of one output over many cases."""
    values = {name: _counted(measurements, name, limits(scope)[name]) for name in STATISTICS}
    largest = {name: max(found, default=None) for name, found in values.items()}
    halves = values["rms_median"]
    return Spread(
        results=len(measurements),
        worst_ratio=largest["worst_ratio"],
        rms_ratio=largest["rms_ratio"],
        rms_median=median(halves) if halves else None,
        largest_z=largest["largest_z"],
        bias_t=largest["bias_t"],
        counted=tuple((name, len(values[name])) for name in STATISTICS),
    )


def measured(result: Result) -> tuple[Measurement, ...]:
    """The measurements of a result that count."""
    if result.verdict in _NOT_COUNTED:
        return ()
    return tuple(m for m in result.measurements if m.elements > 0)


def _counted(measurements: Iterable[Measurement], statistic: str, limit: Limit) -> list[float]:
    name = "rms_ratio" if statistic == "rms_median" else statistic
    values = [(m.elements, badness(getattr(m, name))) for m in measurements]
    return [value for elements, value in values if elements >= limit.elements or value == float("inf")]


def _collect(results: Iterable[tuple[str, Result | None]]) -> dict[Key, dict[str, Measurement]]:
    """Measurements by row and case."""
    found: defaultdict[Key, dict[str, Measurement]] = defaultdict(dict)
    for case_id, result in results:
        if result is None:
            continue
        for measurement in measured(result):
            for feature in (ALL, *result.case.features):
                key = (result.subject, result.check, result.case.dtype, feature, measurement.output)
                found[key][case_id] = measurement
    return found


def _row(key: Key, before: Mapping[str, Measurement], after: Mapping[str, Measurement]) -> Row:
    scope = SAME_CASES if before.keys() == after.keys() else OTHER_CASES
    base = spread(tuple(before.values()), scope) if before else None
    head = spread(tuple(after.values()), scope) if after else None
    return Row(
        *key,
        base=base,
        head=head,
        scope=scope,
        worse=_worse(base, head, scope),
        better=_worse(head, base, scope),
    )


def _worse(before: Spread | None, after: Spread | None, scope: str) -> tuple[str, ...]:
    if before is None or after is None:
        return ()
    return tuple(s for s, limit in limits(scope).items() if _is_worse(before, after, s, limit))


def _is_worse(before: Spread, after: Spread, statistic: str, limit: Limit) -> bool:
    old, new = getattr(before, statistic), getattr(after, statistic)
    if new is None:
        return False
    if new == float("inf"):
        return old is None or old < new
    enough = min(dict(side.counted)[statistic] for side in (before, after)) >= limit.results
    return old is not None and enough and limit.exceeded(old, new)


def _shifts(pair: Pair) -> Iterable[Shift]:
    if pair.base is None or pair.head is None:
        return
    old = {m.output: m for m in measured(pair.base)}
    for new in measured(pair.head):
        if new.output not in old:
            continue
        for statistic, limit in limits(CASE).items():
            before, after = getattr(old[new.output], statistic), getattr(new, statistic)
            few = new.elements < limit.elements and badness(after) < float("inf")
            if not few and limit.exceeded(before, after):
                yield Shift(pair, new.output, statistic, before, after)


def _values(row: Row, statistic: str) -> tuple[float, float]:
    before, after = (getattr(side, statistic, None) for side in (row.base, row.head))
    return (before or 0.0, after or 0.0)


def _excess(limit: Limit, before: float, after: float) -> float:
    return badness(after) / limit.of(badness(before)) if badness(before) < float("inf") else 0.0
