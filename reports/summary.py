"""The summary of a run that every rendering shows."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from attest.conformance.record import Result, RunRecord, Verdict, any_red
from attest.conformance.text import plural
from attest.reports.cards import Card, cards
from attest.reports.pairing import ordered
from attest.reports.spread import Spread, spreads


@dataclass(frozen=True)
class Tally:
    """The number of results of each verdict of a check of a subject."""

    subject: str
    check: str
    counts: tuple[int, ...]

    @property
    def verdicts(self) -> tuple[str, ...]:
        """The verdicts that occur."""
        return tuple(v.value for v, count in zip(Verdict, self.counts, strict=True) if count)

    @property
    def red(self) -> bool:
        """Whether any of them fails the run."""
        return any(count and verdict.red for verdict, count in zip(Verdict, self.counts, strict=True))


@dataclass(frozen=True)
class Known:
    """An expected failure: its reason and link, how many cases it excuses, and the simplest of them."""

    subject: str
    check: str
    reason: str
    link: str
    cases: int
    example: Result


@dataclass(frozen=True)
class Refusal:
    """Calls that a subject declares as unsupported and refused with one message."""

    subject: str
    check: str
    message: str
    cases: int


@dataclass(frozen=True)
class Numbers:
    """The measurements of one output of one check in one dtype."""

    subject: str
    check: str
    dtype: str
    output: str
    spread: Spread


@dataclass(frozen=True)
class Summary:
    """A run in the terms of a report.

    verdicts: those that occur, PASS first; the columns of `tallies`. timeouts: what ran
    out of time, which fails a run, too, but does not show that the kernel is wrong.
    """

    record: RunRecord
    verdicts: tuple[Verdict, ...]
    tallies: tuple[Tally, ...]
    timeouts: tuple[Result, ...]
    known: tuple[Known, ...]
    refusals: tuple[Refusal, ...]
    numbers: tuple[Numbers, ...]

    @property
    def refused(self) -> int:
        """The number of refused calls."""
        return sum(refusal.cases for refusal in self.refusals)

    @cached_property
    def cards(self) -> tuple[Card, ...]:
        """The causes of what failed; a timeout has none."""
        return cards(self.record.results)

    @property
    def causes_in_words(self) -> str:
        """The number of causes and the first of them; empty if nothing failed."""
        if not self.cards:
            return ""
        first = self.cards[0]
        said = f"{first.cause.subject}: {first.parts.headline}"
        return f"1 cause: {said}" if len(self.cards) == 1 else f"{len(self.cards)} causes, the first: {said}"

    def cells(self, tally: Tally) -> list[int]:
        """Return the counts of a tally, for the verdicts that occur."""
        return [n for verdict, n in zip(Verdict, tally.counts, strict=True) if verdict in self.verdicts]

    @property
    def verdict(self) -> str:
        """The run in one word; one that only was cut short neither passed nor found anything."""
        record = self.record
        cut_alone = not record.complete and not record.problems and not any_red(record.results)
        return "INCOMPLETE" if cut_alone else record.status.upper()

    @property
    def headline(self) -> str:
        """The run in one sentence."""
        record = self.record
        parts = [f"{plural(len(record.results), 'result')}"]
        parts += [f"{count} {name}" for name, count in record.counts.items() if count]
        parts += [plural(len(record.problems), "problem")] if record.problems else []
        parts += [f"cut short ({record.note or 'no reason given'})"] if not record.complete else []
        return f"{self.verdict}: {', '.join(parts)}"


def summarise(record: RunRecord) -> Summary:
    """Return the summary of a run, which does not depend on the order of its results."""
    results = ordered(record.results)
    counts: defaultdict[tuple[str, str], Counter[Verdict]] = defaultdict(Counter)
    refused: Counter[tuple[str, str, str]] = Counter()
    known: defaultdict[tuple[str, str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        counts[result.subject, result.check][result.verdict] += 1
        if result.verdict is Verdict.UNSUPPORTED:
            refused[result.subject, result.check, result.message] += 1
        if result.verdict is Verdict.XFAIL:
            known[result.subject, result.check, _reason(result), result.link].append(result)
    return Summary(
        record=record,
        verdicts=tuple(v for v in Verdict if v is Verdict.PASS or any(c[v] for c in counts.values())),
        tallies=tuple(Tally(*key, tuple(found[v] for v in Verdict)) for key, found in sorted(counts.items())),
        timeouts=tuple(result for result in results if result.verdict is Verdict.TIMEOUT),
        known=tuple(
            Known(*key, len(found), min(found, key=_simplicity)) for key, found in sorted(known.items())
        ),
        refusals=tuple(Refusal(*key, count) for key, count in sorted(refused.items())),
        numbers=tuple(_numbers(results)),
    )


def _reason(result: Result) -> str:
    """Return why a failure was expected, without what was found on this one case."""
    return result.message.partition("; found: ")[0]


def _simplicity(result: Result) -> tuple[int, str]:
    return len(result.case.to_json()), result.case.id


def _numbers(results: Iterable[Result]) -> list[Numbers]:
    return [
        Numbers(subject, check, dtype, output, found)
        for (subject, check, dtype, output), found in sorted(spreads(results).items())
    ]


def options_of(record: RunRecord) -> str:
    """Return the options of a run in words: profile, seed, shard, and those that narrowed it."""
    number, count = record.shard
    shard = f", shard {number}/{count}" if count > 1 else ""
    narrowed = f", {record.narrowed}" if record.narrowed else ""
    return f"profile {record.profile}, seed {record.seed}{shard}{narrowed}"
