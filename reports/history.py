"""The history of a kernel over several records: what changed in which, beside its numbers in each.

A number is compared with the record in which it last changed, not with the one before, so that many small
steps in one direction are a change, too. How much is a change is what `attest compare` says. Simpler cases
that only a search found are left out: how far a search came depends on the machine.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from attest.conformance.causes.group import causes
from attest.conformance.record import RunRecord, Verdict
from attest.conformance.text import plural
from attest.reports.failures import newly_wrong
from attest.reports.found import of_results
from attest.reports.pairing import Pair, by_key, pair, with_other_blocks
from attest.reports.rows import row_of_all
from attest.reports.spread import Key, Samples, Spread, samples_of, spread
from attest.reports.words import STATISTIC_WORDS, number, transition

Place = tuple[str, str, str]  # subject, check, dtype

# The statistics that a history follows.
STATISTICS = ("worst_ratio", "rms_ratio", "rms_median")

# Stands for a record without any result of a check.
_NONE = "-"


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
    """Records in order, with the numbers and verdicts of each, and what changed.

    verdicts: how many of each, by subject, check and dtype. steps: the results of each record but the first
    beside those of the record before.
    """

    entries: tuple[Entry, ...]
    numbers: tuple[Mapping[Key, Spread], ...]
    verdicts: tuple[Mapping[Place, Mapping[Verdict, int]], ...]
    changes: tuple[Change, ...]
    steps: tuple[tuple[Pair, ...], ...]

    def changes_in(self, index: int) -> list[str]:
        """Return what changed in a record, in words: verdicts since the record before, then numbers."""
        found: Counter[tuple[str, str, str]] = Counter()
        outputs: Counter[tuple[str, str, str]] = Counter()
        for each in self.steps[index - 1] if index else ():
            both = each.base is not None and each.head is not None
            if each.fate.regressed or (both and each.before != each.after):
                found[*each.key[:2], transition(each.before, each.after)] += 1
            outputs.update((*each.key[:2], output) for output in newly_wrong(each))
        words = [f"{s} {c}: {plural(count, 'case')} {what}" for (s, c, what), count in sorted(found.items())]
        words += [
            f"{s} {c}: {output} is wrong now, too, on {plural(count, 'case')} that failed before"
            for (s, c, output), count in sorted(outputs.items())
        ]
        return words + [str(change) for change in self.changes if change.index == index]

    def series(self) -> list[str]:
        """Return what changed anywhere as a number for each record, in words: verdicts, then numbers."""
        lines: list[str] = []
        for place in sorted({place for verdicts in self.verdicts for place in verdicts}):
            rows = [verdicts.get(place) for verdicts in self.verdicts]
            for verdict in Verdict:
                counts = [None if row is None else row.get(verdict, 0) for row in rows]
                if len(set(counts)) > 1 and any(counts):
                    shown = " ".join(_NONE if count is None else str(count) for count in counts)
                    lines.append(f"{' '.join(place)}: {verdict} {shown}")
        for key, statistic in sorted({(c.key, c.statistic) for c in self.changes}, key=_place):
            values = (getattr(numbers.get(key), statistic, None) for numbers in self.numbers)
            shown = " ".join(map(number, values))
            lines.append(f"{' '.join(key)}: {STATISTIC_WORDS[statistic]} {shown}")
        return lines


def history(entries: Sequence[Entry]) -> History:
    """Return the history of records, in the order given. Raises ValueError for fewer than two."""
    if len(entries) < 2:
        raise ValueError(f"a history needs at least two records, got {len(entries)}")
    records = [_drawn(entry.record) for entry in entries]
    measured = [samples_of(of_results(record.results)) for record in records]
    numbers = tuple({key: spread(samples) for key, samples in found.items()} for found in measured)
    return History(
        entries=tuple(entries),
        numbers=numbers,
        verdicts=tuple(_verdicts(record) for record in records),
        changes=tuple(_changes(records, measured)),
        steps=tuple(pair(base, head) for base, head in pairwise(records)),
    )


def _place(followed: tuple[Key, str]) -> tuple[Key, int]:
    key, statistic = followed
    return key, STATISTICS.index(statistic)


def _changes(records: Sequence[RunRecord], measured: Sequence[Mapping[Key, Samples]]) -> list[Change]:
    levels: dict[tuple[Key, str], int] = {}
    changes: list[Change] = []
    for index, found in enumerate(measured):
        other_blocks = [with_other_blocks(record, records[index]) for record in records[:index]]
        for key in sorted(found):
            since_of = {statistic: levels.setdefault((key, statistic), index) for statistic in STATISTICS}
            for since in sorted(set(since_of.values()) - {index}):
                row = row_of_all(key, measured[since][key], found[key], key[0] in other_blocks[since])
                for statistic in (name for name in STATISTICS if since_of[name] == since):
                    if statistic in (*row.worse, *row.better):
                        levels[key, statistic] = index
                        sides = (getattr(row.base, statistic), getattr(row.head, statistic))
                        worse = statistic in row.worse
                        changes.append(Change(key, statistic, index, since, *sides, worse))
    return changes


def _drawn(record: RunRecord) -> RunRecord:
    """Return a record without the cases that only a search found, and without those that the clock cut."""
    drawn = (found for found in of_results(record.results) if found.drawn)
    return replace(record, results=tuple(found.result for found in by_key(drawn).values()))


def _verdicts(record: RunRecord) -> dict[Place, Counter[Verdict]]:
    found: defaultdict[Place, Counter[Verdict]] = defaultdict(Counter)
    for result in record.results:
        found[result.subject, result.check, result.case.dtype][result.verdict] += 1
    return dict(found)
