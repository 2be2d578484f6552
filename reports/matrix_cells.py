"""The cells of one implementation in the matrix: what the results of a record say about each clause.

The state of a cell is that of the first rule that holds:

1. "fails": a FAIL or XFAIL breaks the clause, by reports/attribution.py.
2. "not supported": the Subject does not declare the clause, or each result of it is UNSUPPORTED.
3. "passes": a result of it is PASS or XPASS; of S20, which asks for refusals, or UNSUPPORTED.
4. "inconclusive": there are results, and none shows anything: INCONCLUSIVE, TIMEOUT, ERROR, or failures that
   break another clause.
5. "not run": it is declared, and there is no result.

The same rules hold for the results of one dtype, whose state is "not supported" where it is not declared.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from attest.conformance.cases.features import ALL_FEATURES
from attest.conformance.clauses import CLAUSES
from attest.conformance.record import ACCURACY, Result, Verdict
from attest.reports.attribution import Attributed, attributed
from attest.reports.matrix_lines import Line

FAILURES = (Verdict.FAIL, Verdict.XFAIL)
PASSES = (Verdict.PASS, Verdict.XPASS)
REFUSALS = "S20"
# The checks that a feature which is not declared is refused.
_UNDECLARED = "refusal.undeclared_"
# How many passing cases of a check are kept, to see what the failing ones have in common.
_PASSING_CASES = 1000


class State(StrEnum):
    """The state of a cell."""

    FAILS = "fails"
    PASSES = "passes"
    INCONCLUSIVE = "inconclusive"
    NOT_SUPPORTED = "not supported"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Part:
    """The results of a clause in one dtype, or in all.

    counts: the failures that break the clause, whether or not their check names it, and all results of it
    that do not fail. elsewhere: the failures of it that break other clauses.
    """

    state: State
    counts: Mapping[Verdict, int] = field(default_factory=dict[Verdict, int])
    elsewhere: int = 0

    @property
    def results(self) -> int:
        """The number of results."""
        return sum(self.counts.values()) + self.elsewhere

    @property
    def broken(self) -> int:
        """The number of failures that break the clause."""
        return sum(self.counts.get(verdict, 0) for verdict in FAILURES)

    @property
    def known(self) -> bool:
        """Whether it fails, and each failure is an expected one."""
        return self.state is State.FAILS and not self.counts.get(Verdict.FAIL)


@dataclass(frozen=True)
class Worst:
    """The largest err/bound of the conclusive results of a cell, and the result that has it."""

    ratio: float
    output: str
    result: Result


@dataclass(frozen=True)
class KnownFault:
    """An expected failure in a cell: the link of its expectation, the reason, and the number of results."""

    link: str
    reason: str
    results: int


@dataclass(frozen=True)
class Cell:
    """The results of one clause of one implementation.

    whole: of all dtypes. dtypes: of each. evidence: the simplest failure; or, if the clause holds, the result
    of the largest err/bound, or the first. refused: calls with the feature of the clause that were refused,
    as they should be, since it is not declared.
    """

    whole: Part
    dtypes: Mapping[str, Part]
    worst: Worst | None = None
    evidence: Result | None = None
    known: tuple[KnownFault, ...] = ()
    refused: int = 0


@dataclass(frozen=True)
class Declared:
    """The declarations of a Subject in its record. clauses: None in an older record.

    dialect: the fields of its semantics that differ from the standard, in words.
    """

    dtypes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    clauses: frozenset[str] | None = None
    dialect: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass
class _Counts:
    """The results of a clause in one dtype, while they are read."""

    counts: Counter[Verdict] = field(default_factory=Counter[Verdict])
    elsewhere: int = 0

    def part(self, clause: str, declared: bool) -> Part:
        """Return the part of a cell."""
        state = _state(clause, self, declared)
        kept = {verdict: self.counts[verdict] for verdict in Verdict if self.counts[verdict]}
        return Part(state, kept, self.elsewhere)

    def add(self, other: "_Counts") -> None:
        """Add the results of another dtype."""
        self.counts += other.counts
        self.elsewhere += other.elsewhere


def _state(clause: str, found: _Counts, declared: bool) -> State:
    counts = found.counts
    unsupported = 0 if clause == REFUSALS else counts[Verdict.UNSUPPORTED]
    results = counts.total() + found.elsewhere
    if any(counts[verdict] for verdict in FAILURES):
        return State.FAILS
    if not declared or (results and unsupported == results):
        return State.NOT_SUPPORTED
    if any(count and shows(clause, verdict) for verdict, count in counts.items()):
        return State.PASSES
    return State.INCONCLUSIVE if results else State.NOT_RUN


def shows(clause: str, verdict: Verdict) -> bool:
    """Return whether a result of a clause with a verdict shows that the clause holds."""
    return verdict in PASSES or (clause == REFUSALS and verdict is Verdict.UNSUPPORTED)


def cells_of(lines: Iterable[Line], declared: Declared) -> tuple[dict[str, Cell], tuple[Result, ...]]:
    """Return the cells of one subject by clause, and the failures that break no clause that is known.

    lines: its results, in order. Raises ValueError if one of them is broken.
    """
    found: defaultdict[tuple[str, str], _Counts] = defaultdict(_Counts)
    worst: dict[str, tuple[float, Line]] = {}
    first: dict[str, Line] = {}
    refused: Counter[str] = Counter()
    failures: list[Line] = []
    beside: defaultdict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line.verdict in FAILURES:
            failures.append(line)
            continue
        if line.verdict is Verdict.UNSUPPORTED and line.check.startswith(_UNDECLARED):
            feature = ALL_FEATURES.get(line.check.removeprefix(_UNDECLARED))
            refused.update([feature.clause] if feature is not None else [])
        if line.verdict is Verdict.PASS and line.check in ACCURACY:
            beside[line.check] += [line] if len(beside[line.check]) < _PASSING_CASES else []
        for clause in line.clauses:
            found[clause, line.dtype].counts[line.verdict] += 1
            if line.verdict in PASSES:
                first.setdefault(clause, line)
                if line.ratio is not None and line.ratio > worst.get(clause, (-math.inf, line))[0]:
                    worst[clause] = line.ratio, line
    groups = _attributed(failures, beside, CLAUSES if declared.clauses is None else declared.clauses)
    breaking = _count(groups, found)
    cells: dict[str, Cell] = {}
    for clause in CLAUSES:
        passing = worst.get(clause)
        parts = {dtype: counts for (name, dtype), counts in found.items() if name == clause}
        cells[clause] = _cell(
            clause,
            parts,
            declared,
            breaking.get(clause, ()),
            passing[1] if passing else first.get(clause),
            refused[clause],
        )
    return cells, tuple(result for group in groups if not group.clauses for result in group.results)


def _attributed(
    failures: Sequence[Line], beside: Mapping[str, Sequence[Line]], declared: Collection[str]
) -> tuple[Attributed, ...]:
    if not failures:
        return ()
    lines = (*failures, *(line for own in beside.values() for line in own))
    return attributed((line.result for line in lines), declared)


def _count(
    groups: Sequence[Attributed], found: Mapping[tuple[str, str], _Counts]
) -> dict[str, list[Attributed]]:
    """Count failures where they belong; return those that break each clause, unexpected ones first."""
    breaking: defaultdict[str, list[Attributed]] = defaultdict(list)
    for group in sorted(groups, key=lambda group: group.known):
        for clause in group.clauses:
            breaking[clause].append(group)
        for result in group.results:
            for clause in group.clauses:
                found[clause, result.case.dtype].counts[result.verdict] += 1
            for clause in set(result.clauses) - set(group.clauses):
                found[clause, result.case.dtype].elsewhere += 1
    return breaking


def _cell(
    clause: str,
    parts: Mapping[str, _Counts],
    declared: Declared,
    breaking: Sequence[Attributed],
    passing: Line | None,
    refused: int,
) -> Cell:
    holds = declared.clauses is None or clause in declared.clauses
    every = _Counts()
    for counts in parts.values():
        every.add(counts)
    dtypes = declared.dtypes or tuple(sorted(parts))
    named = dict.fromkeys([*dtypes, *sorted(parts)])
    whole = every.part(clause, holds)
    passed = None if passing is None or whole.state is State.NOT_SUPPORTED else passing.result
    shown = breaking[0].results[0] if breaking else passed
    return Cell(
        whole=whole,
        dtypes={
            dtype: parts.get(dtype, _Counts()).part(clause, holds and dtype in dtypes) for dtype in named
        },
        worst=_worst([result for group in breaking for result in group.results], passed),
        evidence=shown,
        known=tuple(
            KnownFault(group.link, group.reason, len(group.results)) for group in breaking if group.known
        ),
        refused=refused,
    )


def found_words(result: Result) -> str:
    """Return what was found, in one line: without why it was expected."""
    said, _, found = result.message.partition("; found: ")
    return (found if result.verdict is Verdict.XFAIL and found else said).partition("\n")[0]


def _worst(broken: Sequence[Result], passing: Result | None) -> Worst | None:
    results = [*broken, *([] if passing is None else [passing])]
    measured = [(m.worst_ratio, m.output, result) for result in results for m in result.measurements]
    if not measured:
        return None
    # NaN is worse than any number.
    ratio, output, result = max(measured, key=lambda each: math.inf if math.isnan(each[0]) else each[0])
    return Worst(ratio, output, result)
