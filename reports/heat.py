"""Heat maps: the share of cases with wrong numbers, by feature and output of a subject."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from attest.conformance.record import ACCURACY, Result, Verdict, in_order

EVERY_CASE = "every case"
# Shades of a map, from no case wrong to all.
_SHADES = 4
_COUNTED = (Verdict.PASS, Verdict.FAIL)


@dataclass(frozen=True)
class Cell:
    """The cases with a feature: how many have a wrong output, and how many were tested."""

    wrong: int
    cases: int

    @property
    def shade(self) -> int:
        """0 if none is wrong, else 1 to 4, the more the larger their share."""
        return -(-_SHADES * self.wrong // self.cases) if self.cases else 0


@dataclass(frozen=True)
class HeatMap:
    """A subject's share of wrong cases. rows: by feature, every case first; a cell for each output."""

    subject: str
    outputs: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]

    @property
    def wrong(self) -> bool:
        """Whether any output of any case is wrong."""
        return any(cell.wrong for _, cells in self.rows for cell in cells)


def heat_maps(results: Iterable[Result]) -> tuple[HeatMap, ...]:
    """Return a map for each subject that the accuracy checks measured, those with wrong cases first.

    Simpler cases that shrinking found are left out: all of them fail. So are expected failures.
    """
    wrong: defaultdict[str, dict[tuple[str, str, str], bool]] = defaultdict(dict)
    features: dict[str, frozenset[str]] = {}
    for result in results:
        if result.check not in ACCURACY or result.verdict not in _COUNTED or not result.drawn:
            continue
        features[result.case.id] = result.case.features
        for measurement in result.measurements:
            place = (result.case.id, measurement.output, result.check)
            wrong[result.subject][place] = bool(measurement.broken)
    maps = [_map(subject, places, features) for subject, places in wrong.items()]
    return tuple(sorted(maps, key=lambda found: (not found.wrong, found.subject)))


def _map(
    subject: str, places: dict[tuple[str, str, str], bool], features: dict[str, frozenset[str]]
) -> HeatMap:
    judged: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    broken: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for (case, output, _), bad in places.items():
        for feature in (EVERY_CASE, *features[case]):
            judged[feature, output].add(case)
            if bad:
                broken[feature, output].add(case)
    outputs = in_order({output for _, output in judged})
    names = sorted({feature for feature, _ in judged}, key=lambda name: (name != EVERY_CASE, name))
    return HeatMap(
        subject,
        tuple(outputs),
        tuple(
            (
                name,
                tuple(
                    Cell(len(broken.get((name, output), ())), len(judged.get((name, output), ())))
                    for output in outputs
                ),
            )
            for name in names
        ),
    )
