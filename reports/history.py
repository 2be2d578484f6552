"""The history of a kernel over several records: what changed in which, beside its numbers in each.

A number is compared with the record in which it last changed, not with the one before, so that many small
steps in one direction are a change, too. How much is a change is what `attest compare` says. Simpler cases
that a run searched are left out: how far a search came depends on the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from attest.conformance.causes.group import causes
from attest.conformance.record import RunRecord
from attest.conformance.text import plural
from attest.reports.compare import Comparison, compare_records
from attest.reports.spread import ALL, Spread, spreads
from attest.reports.words import STATISTIC_WORDS, number

Key = tuple[str, str, str, str]  # subject, check, dtype, output

# The statistics that a history follows.
STATISTICS = ("worst_ratio", "rms_ratio", "rms_median")


@dataclass(frozen=True)
class Entry:
    """One record of a history. label: the name of its file. commit: of the code that was judged."""

    label: str
    record: RunRecord

    @property
    def commit(self) -> str:
        """The commit of the code that was judged; empty if it is unknown."""
        return str(self.record.environment.get("commit", ""))

    @property
    def summary(self) -> str:
        """The verdicts in words."""
        counts = {verdict: count for verdict, count in self.record.counts.items() if count}
        found = len(causes(self.record.results))
        words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no result"
        return words + (f", {plural(found, 'cause')} of failures" if found else "")


@dataclass(frozen=True)
class Change:
    """One number that changed. index: of the record; since: of the record that it is compared with."""

    key: Key
    statistic: str
    index: int
    since: int
    before: float | None
    after: float | None
    worse: bool

    def __str__(self) -> str:
        direction = "worse" if self.worse else "better"
        numbers = f"{number(self.before)} -> {number(self.after)}"
        return f"{' '.join(self.key)}: {STATISTIC_WORDS[self.statistic]} {numbers}, {direction}"


@dataclass(frozen=True)
class History:
    """Records in order, with the numbers of each, and what changed."""

    entries: tuple[Entry, ...]
    numbers: tuple[dict[Key, Spread], ...]
    changes: tuple[Change, ...]
    verdicts: tuple[Comparison, ...]

    def changes_in(self, index: int) -> list[str]:
        """Return what changed in a record, in words: verdicts since the record before, then numbers."""
        found: list[str] = []
        if index:
            comparison = self.verdicts[index - 1]
            fates: dict[tuple[str, str, str, str], int] = {}
            for pair in comparison.pairs:
                if pair.base is not None and pair.head is not None and pair.before != pair.after:
                    key = (pair.result.subject, pair.result.check, pair.before, pair.after)
                    fates[key] = fates.get(key, 0) + 1
            found = [f"{s} {c}: {plural(n, 'case')} {b} -> {a}" for (s, c, b, a), n in sorted(fates.items())]
        return found + [str(change) for change in self.changes if change.index == index]


def history(entries: Sequence[Entry]) -> History:
    """Return the history of records, in the order given. Raises ValueError for fewer than two."""
    if len(entries) < 2:
        raise ValueError(f"a history needs at least two records, got {len(entries)}")
    records = [_drawn(entry.record) for entry in entries]

    @cache
    def compared(base: int, head: int) -> Comparison:
        return compare_records(records[base], records[head])

    numbers = tuple(_numbers(record) for record in records)
    levels: dict[tuple[Key, str], int] = {}
    changes: list[Change] = []
    for index, found in enumerate(numbers):
        for key in sorted(found):
            for statistic in STATISTICS:
                since = levels.setdefault((key, statistic), index)
                worse, better = _verdict(compared(since, index), key) if since < index else ((), ())
                if statistic in (*worse, *better):
                    levels[key, statistic] = index
                    old, new = numbers[since].get(key), found[key]
                    sides = (getattr(old, statistic, None), getattr(new, statistic))
                    changes.append(Change(key, statistic, index, since, *sides, statistic in worse))
    steps = tuple(compared(index - 1, index) for index in range(1, len(records)))
    return History(tuple(entries), numbers, tuple(changes), steps)


def _drawn(record: RunRecord) -> RunRecord:
    """Return a record without the cases that were searched."""
    return replace(record, results=tuple(result for result in record.results if not result.minimal))


def _numbers(record: RunRecord) -> dict[Key, Spread]:
    """Return the spread of each output over all cases."""
    return {
        (subject, check, dtype, output): spread
        for (subject, check, dtype, feature, output), spread in spreads(record.results).items()
        if feature == ALL
    }


def _verdict(comparison: Comparison, key: Key) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which statistics of an output became worse and better."""
    for row in comparison.rows:
        if row.feature == ALL and (row.subject, row.check, row.dtype, row.output) == key:
            return row.worse, row.better
    return (), ()
