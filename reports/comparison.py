"""The comparison of two runs, verdict by verdict and number by number.

A change regresses if any rule of `_RULES` yields a regression.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from attest.conformance.causes.group import causes
from attest.conformance.record import Result, Verdict
from attest.conformance.records.counted import CountedRun
from attest.conformance.text import plural
from attest.reports.failures import NewCause, new_causes, newly_wrong, otherwise
from attest.reports.pairing import Fate, Pair, same_draw, same_extent
from attest.reports.part import Part
from attest.reports.rows import ALL, Row, Shift
from attest.reports.thresholds import OTHER_CASES
from attest.reports.words import STATISTIC_WORDS, transition


@dataclass(frozen=True)
class Regression:
    """One thing that became worse: where, and what, in words. severity: the larger, the earlier listed."""

    where: str
    what: str
    severity: float = 0.0

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Comparison:
    """Two runs, base before the change and head after it, and all that differs between them.

    parts: by subject and check. failed: the failures of head, and what passes beside them.
    """

    base: CountedRun
    head: CountedRun
    parts: tuple[Part, ...]
    failed: tuple[Result, ...]

    @property
    def both(self) -> int:
        """The number of results that both runs have."""
        return sum(part.both for part in self.parts)

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """The results of each run beside those of the other, if they differ or head fails; in order."""
        return tuple(pair for part in self.parts for pair in part.pairs)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every output by subject, check, dtype and feature, in order."""
        return tuple(row for part in self.parts for row in part.rows)

    @cached_property
    def shifts(self) -> tuple[Shift, ...]:
        """Every number that became worse on a case that both runs measured, the worst first."""
        found = (shift for part in self.parts for shift in part.shifts)
        return tuple(sorted(found, key=lambda s: (-s.severity, s.pair.key, s.output, s.statistic)))

    @cached_property
    def regressions(self) -> tuple[Regression, ...]:
        """The changes for the worse, the most important first; empty if the change may go in."""
        found = ((rank, regression) for rank, rule in enumerate(_RULES) for regression in rule(self))
        ranked = sorted(found, key=lambda item: (item[0], -item[1].severity, str(item[1])))
        return tuple(regression for _, regression in ranked)

    @property
    def regressed(self) -> bool:
        """Whether anything became worse."""
        return bool(self.regressions)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """The notes that a reader needs for the rest."""
        return tuple(_notes(self))

    @cached_property
    def new_causes(self) -> tuple[NewCause, ...]:
        """The causes of head with a failure that base does not have, or has otherwise."""
        return new_causes(self.failed, self.pairs)

    @cached_property
    def redrawn(self) -> frozenset[tuple[str, str]]:
        """The subjects and checks with other cases in head, though the options are the same."""
        if not same_draw(self.base.run, self.head.run):
            return frozenset()
        gone = (p for p in self.of_fate(Fate.GONE) if p.base is not None and p.base.verdict is Verdict.PASS)
        return frozenset(p.key[:2] for p in gone)

    def of_fate(self, *fates: Fate) -> tuple[Pair, ...]:
        """Return the pairs of some fates but SAME, in order."""
        return tuple(pair for pair in self.pairs if pair.fate in fates)

    @property
    def headline(self) -> str:
        """The comparison in one sentence."""
        if self.regressions:
            shown = "; ".join(str(regression) for regression in self.regressions[:3])
            more = f"; and {len(self.regressions) - 3} more" if len(self.regressions) > 3 else ""
            return f"{plural(len(self.regressions), 'regression')}: {shown}{more}"
        parts = [f"{plural(self.both, 'result')} compared"]
        for fate, word in (
            (Fate.FIXED, "fixed"),
            (Fate.NEW, "new"),
            (Fate.GONE, "gone"),
            (Fate.UNREACHED, "unreached"),
        ):
            count = len(self.of_fate(fate))
            parts += [f"{count} {word}"] if count else []
        fails = f"; head fails with {self.head_failures}" if self.head_failures else ""
        return f"No regression{fails}: {', '.join(parts)}"

    @cached_property
    def head_failures(self) -> str:
        """What fails the run of head, whether or not base fails, too; empty if it passes."""
        red, found = self.head.red, len(causes(self.failed))
        parts = (
            [plural(red, "failing result") + (f" ({plural(found, 'cause')})" if found else "")] if red else []
        )
        problems = self.head.run.problems
        parts += [plural(len(problems), "problem")] if problems else []
        return " and ".join(parts)


def _unusable(comparison: Comparison) -> Iterable[Regression]:
    """Yield a run that ended early or holds nothing: it proves nothing."""
    for name, record in (("base", comparison.base.run), ("head", comparison.head.run)):
        if not record.complete:
            yield Regression(f"{name} record", f"incomplete{f': {record.note}' if record.note else ''}")
    if not comparison.head.results:
        yield Regression("head record", "holds no results")


def _verdicts(comparison: Comparison) -> Iterable[Regression]:
    """Yield verdicts that became red, and passes that are no more, counted by subject, check and dtype."""
    cut_short = not comparison.head.run.complete
    groups: defaultdict[tuple[str, str, str], list[Pair]] = defaultdict(list)
    for changed in comparison.of_fate(Fate.BROKEN, Fate.LOST):
        if not (cut_short and changed.head is None):
            groups[changed.group].append(changed)
    for group, members in groups.items():
        broken = sum(member.fate is Fate.BROKEN for member in members)
        kinds = Counter(transition(member.before, member.after) for member in members)
        what = ", ".join(f"{plural(count, 'case')} {kind}" for kind, count in sorted(kinds.items()))
        yield Regression(" ".join(group), what, severity=1e6 * broken + len(members))


def _outputs(comparison: Comparison) -> Iterable[Regression]:
    """Yield outputs that became wrong on cases that failed before, too, with other outputs."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    for changed in comparison.pairs:
        found.update((*changed.group, output) for output in newly_wrong(changed))
    for place, count in found.items():
        what = f"wrong now, too, on {plural(count, 'case')} that failed before"
        yield Regression(" ".join(place), what, severity=count)


def _timeouts(comparison: Comparison) -> Iterable[Regression]:
    """Yield cases that ran out of time: neither right nor wrong, and so counted apart."""
    groups: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for late in comparison.of_fate(Fate.TIMED_OUT):
        groups[late.group][late.result.phase or "an unknown phase"] += 1
    for group, phases in groups.items():
        what = ", ".join(
            f"{plural(count, 'case')} timed out in {name}" for name, count in sorted(phases.items())
        )
        yield Regression(" ".join(group), what, severity=phases.total())


def _coverage(comparison: Comparison) -> Iterable[Regression]:
    """Yield what passed in a dtype or with a feature and no longer does, where the runs have other cases."""
    base, head = comparison.base.run, comparison.head.run
    if not same_extent(base, head) or not head.complete:
        return
    for part in comparison.parts:
        if same_draw(base, head) and part.place not in comparison.redrawn:
            continue
        for name, count in part.gone.items():
            where = " ".join((*part.place, name))
            yield Regression(where, f"{plural(count, 'case')} passed, none is left", severity=count)


def _numbers(comparison: Comparison) -> Iterable[Regression]:
    """Yield numbers that became worse, over many cases or on one, by subject, check, dtype and output."""
    outputs: defaultdict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    single: defaultdict[tuple[str, str, str, str], list[Shift]] = defaultdict(list)
    for row in comparison.rows:
        if row.worse:
            outputs[row.subject, row.check, row.dtype, row.output].append(row)
    for shift in comparison.shifts:
        single[*shift.pair.group, shift.output].append(shift)
    for output in outputs.keys() | single.keys():
        parts: list[str] = []
        if output in outputs:
            parts += [_row_in_words(outputs[output][0])]
        if output in single:
            cases = len({shift.pair.case_id for shift in single[output]})
            shift = single[output][0]
            change = f"{shift.name} {shift.before:.3g} -> {shift.after:.3g}"
            parts += [f"{plural(cases, 'case')} got worse, most {change}"]
        severity = max(item.severity for item in (*outputs[output], *single[output]))
        yield Regression(" ".join(output), "; ".join(parts), severity)


def _row_in_words(row: Row) -> str:
    where = "" if row.feature == ALL else f"with {row.feature}, "
    changes = (
        f"{STATISTIC_WORDS[name]} {_or_none(getattr(row.base, name))} -> {_or_none(getattr(row.head, name))}"
        for name in row.worse
    )
    return where + ", ".join(changes)


def _or_none(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _unmeasured(comparison: Comparison) -> Iterable[Regression]:
    """Yield outputs that are no longer measured on cases that pass."""
    for part in comparison.parts:
        for place, count in part.missing.items():
            what = f"no longer measured on {plural(count, 'case')}"
            yield Regression(" ".join((*part.place, *place)), what, severity=count)


def _problems(comparison: Comparison) -> Iterable[Regression]:
    """Yield problems of the run as a whole that were not there before."""
    for problem in comparison.head.run.problems:
        if problem not in comparison.base.run.problems:
            yield Regression("new problem", problem)


# In the order of importance.
_RULES: tuple[Callable[[Comparison], Iterable[Regression]], ...] = (
    _unusable,
    _verdicts,
    _outputs,
    _timeouts,
    _coverage,
    _numbers,
    _unmeasured,
    _problems,
)


def _notes(comparison: Comparison) -> Iterable[str]:
    base, head = comparison.base.run, comparison.head.run
    for name in ("profile", "seed", "shard", "narrowed"):
        before, after = (_written(getattr(record, name)) for record in (base, head))
        if before != after:
            yield f"{name}: base {before}, head {after}; the runs have different cases"
    lost = [p for p in comparison.of_fate(Fate.LOST) if p.head is None]
    if lost and head.complete:
        yield (
            f"{plural(len(lost), 'passing case')} of base not in head, though the options are the same:"
            " a failing case was shrunk to another, a subject declares something else, or the cases of the"
            " suite changed; after either of the latter, record base again"
        )
    for subject in sorted({subject for subject, _ in comparison.redrawn}):
        yield (
            f"{subject} has other cases in head, though the options are the same: it declares something else,"
            " such as block sizes, or the cases of the suite changed; compared are the cases of both, and"
            " whether each dtype and feature still passes"
        )
    if lost and not head.complete:
        yield f"{plural(len(lost), 'passing case')} of base not reached in head"
    changed = sum(otherwise(p) for p in comparison.pairs)
    if changed:
        yield f"{plural(changed, 'case')} failed in base, and in head in another way: no regression"
    unreached = len(comparison.of_fate(Fate.UNREACHED))
    if unreached:
        yield f"{plural(unreached, 'result')} of base not reached in head: their cases timed out"
    if not comparison.base.results:
        yield "base holds no results: everything in head is new"
    both = [row for row in comparison.rows if row.base and row.head]
    different = sum(row.scope == OTHER_CASES for row in both)
    if different:
        yield (
            f"{different} of {plural(len(both), 'row')} of numbers compare different cases, with the wider"
            " slack of other_cases in reports/compare.toml"
        )
    yield from _novelties(comparison)


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(str(part) for part in value)
    return str(value) or "not at all"


def _novelties(comparison: Comparison) -> Iterable[str]:
    """Yield subjects that only one run has; checks and outputs that only one has of what both have."""
    before, after = (
        [(*part.place, outputs) for part in comparison.parts if (outputs := part.outputs[side]) is not None]
        for side in (0, 1)
    )
    levels: tuple[tuple[str, Callable[[str, str, Iterable[str]], Iterable[str]]], ...] = (
        ("subject", lambda subject, check, outputs: (subject,)),
        ("check", lambda subject, check, outputs: (f"{subject} {check}",)),
        ("output", lambda subject, check, outputs: (f"{subject} {check} {name}" for name in outputs)),
    )
    for level, names in levels:
        old = {name for part in before for name in names(*part)}
        new = {name for part in after for name in names(*part)}
        for words, only in (("new in head", new - old), ("only in base", old - new)):
            if only:
                yield f"{words}: {level} {', '.join(sorted(only))}"
        shared = old & new
        before = [part for part in before if shared.intersection(names(*part))]
        after = [part for part in after if shared.intersection(names(*part))]
