"""Statistics of the measurements of many cases, by output of a check in a dtype."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attest.conformance.record import Measurement, Result
from attest.reports.found import Found, Numbers, of_results
from attest.reports.thresholds import OTHER_CASES, Limit, limits

STATISTICS = ("worst_ratio", "rms_ratio", "rms_median", "largest_z", "bias_t")
# The columns of Samples.
_COLUMNS = {"worst_ratio": 0, "rms_ratio": 1, "rms_median": 1, "largest_z": 2, "bias_t": 3}
_ELEMENTS, _KEYS = 4, 5

Key = tuple[str, str, str, str]  # subject, check, dtype, output
Column = NDArray[np.float64]


@dataclass(frozen=True)
class Samples:
    """The measurements of one output in many cases.

    cases: the id of the case of each, and how many of its measurements come before, since some checks call a
    kernel several times. features: of each case. table: a row for each, with the statistics without their
    sign, NaN as inf, and the elements and keys.
    """

    cases: Sequence[tuple[str, int]]
    features: Sequence[tuple[str, ...]]
    table: Column

    def values(self, scope: str) -> Column:
        """Return a row for each of STATISTICS; NaN where a case has too little for one to say anything."""
        return np.stack([self.column(name, limits(scope)[name]) for name in STATISTICS])

    def column(self, statistic: str, limit: Limit) -> Column:
        """Return a statistic of each case, NaN where there is too little for it to say anything."""
        found = self.table[:, _COLUMNS[statistic]]
        enough = (self.table[:, _ELEMENTS] >= limit.elements) & (self.table[:, _KEYS] >= limit.keys)
        return np.where(enough | np.isinf(found), found, np.nan)


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


def spread(samples: Samples, scope: str = OTHER_CASES) -> Spread:
    """Return the statistics of one output over many cases."""
    return spread_of(samples.values(scope))


def spread_of(values: Column) -> Spread:
    """Return the statistics of a row of values for each of STATISTICS, of one case or more."""
    counted = np.sum(~np.isnan(values), axis=1).tolist()
    largest = np.fmax.reduce(values, axis=1).tolist()
    found = {
        name: value if count else None
        for name, value, count in zip(STATISTICS, largest, counted, strict=True)
    }
    halves = values[STATISTICS.index("rms_median")]
    return Spread(
        results=values.shape[1],
        worst_ratio=found["worst_ratio"],
        rms_ratio=found["rms_ratio"],
        rms_median=None if found["rms_median"] is None else float(np.median(halves[~np.isnan(halves)])),
        largest_z=found["largest_z"],
        bias_t=found["bias_t"],
        counted=tuple(zip(STATISTICS, counted, strict=True)),
    )


def samples_of(found: Iterable[Found]) -> dict[Key, Samples]:
    """Return the measurements of results by output of a check in a dtype."""
    own: defaultdict[Key, list[tuple[int, Found, Numbers]]] = defaultdict(list)
    for each in found:
        met: dict[str, int] = {}
        for numbers in each.counted:
            output = numbers.output
            before = met[output] = met.get(output, -1) + 1
            own[each.subject, each.check, each.facts.dtype, output].append((before, each, numbers))
    return {
        key: Samples(
            cases=[(each.case_id, before) for before, each, _ in samples],
            features=[each.facts.features for _, each, _ in samples],
            table=_table([_row(each, numbers) for _, each, numbers in samples]),
        )
        for key, samples in own.items()
    }


def _row(found: Found, numbers: Numbers) -> tuple[float, ...]:
    """Return a row of a table; where only the bound judges a family, only its ratio counts."""
    if found.facts.only_bound:
        return float(numbers.worst_ratio), 0.0, 0.0, 0.0, 0, found.facts.keys
    statistics = (numbers.worst_ratio, numbers.rms_ratio, numbers.largest_z, numbers.bias_t)
    return *map(float, statistics), numbers.elements, found.facts.keys


def _table(rows: Sequence[tuple[float, ...]]) -> Column:
    table = np.array(rows, np.float64)
    return np.where(np.isnan(table), np.inf, np.abs(table))


def measured(result: Result) -> Sequence[Measurement]:
    """Return the measurements of a result that count; without elements where only the bound judges."""
    (found,) = of_results([result])
    if not found.facts.only_bound or not found.counted:
        return result.measurements if found.counted else ()
    return tuple(
        replace(m, elements=0, rms_ratio=0.0, largest_z=0.0, bias_t=0.0) for m in result.measurements
    )
