"""The summary of a run that every rendering shows."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from attest.conformance.record import Result, RunRecord, Verdict
from attest.conformance.records.counted import CountedRun
from attest.conformance.records.lines import RecordLines
from attest.conformance.text import plural
from attest.reports.cards import Card, cards
from attest.reports.found import Found, Place, evidence, found_in, of_results
from attest.reports.pairing import ordered
from attest.reports.spread import Spread, samples_of, spread

# The verdicts of which a report says more than how many there are; of the red ones, by cause.
_TOLD = (Verdict.TIMEOUT, Verdict.UNSUPPORTED, Verdict.XFAIL)


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
    failed: what fails, and what passes beside it. cases: how many there are, those of each subject apart.
    seconds: of each subject and check; feature_seconds: of the cases with each feature.
    """

    of: CountedRun
    verdicts: tuple[Verdict, ...]
    tallies: tuple[Tally, ...]
    timeouts: tuple[Result, ...]
    known: tuple[Known, ...]
    refusals: tuple[Refusal, ...]
    numbers: tuple[Numbers, ...]
    failed: tuple[Result, ...]
    cases: int
    seconds: Mapping[Place, float]
    feature_seconds: Mapping[str, float]

    @property
    def refused(self) -> int:
        """The number of refused calls."""
        return sum(refusal.cases for refusal in self.refusals)

    @cached_property
    def cards(self) -> tuple[Card, ...]:
        """The causes of what failed; a timeout has none."""
        return cards(self.failed)

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
        run = self.of.run
        cut_alone = not run.complete and not run.problems and not self.of.red
        return "INCOMPLETE" if cut_alone else self.of.status.upper()

    @property
    def headline(self) -> str:
        """The run in one sentence."""
        run = self.of.run
        parts = [f"{plural(self.of.results, 'result')}"]
        empty_shard = not self.of.results and run.complete and run.shard != (1, 1)
        parts += ["since this shard has no case"] if empty_shard else []
        parts += [f"{count} {name}" for name, count in self.of.counts.items() if count]
        parts += [plural(len(run.problems), "problem")] if run.problems else []
        parts += [f"cut short ({run.note or 'no reason given'})"] if not run.complete else []
        return f"{self.verdict}: {', '.join(parts)}"


def summarise(record: RunRecord) -> Summary:
    """Return the summary of a run, which does not depend on the order of its results."""
    return _summarised(replace(record, results=()), of_results(ordered(record.results)))


def summarise_lines(lines: RecordLines) -> Summary:
    """Return the summary of a record that is read line by line. Raises ValueError if it is broken."""
    return _summarised(lines.header, found_in(lines))


def _summarised(run: RunRecord, results: Iterable[Found]) -> Summary:
    """Return the summary of a run. results: all of them, in order."""
    tallies: list[Tally] = []
    refused: Counter[tuple[str, str, str]] = Counter()
    known: dict[tuple[str, str, str, str], tuple[int, Result]] = {}
    timeouts: list[Result] = []
    numbers: list[Numbers] = []
    shown: list[Found] = []
    cases: set[tuple[str, str]] = set()
    seconds: defaultdict[Place, float] = defaultdict(float)
    feature_seconds: defaultdict[str, float] = defaultdict(float)
    for place, group in groupby(results, key=lambda found: found.place):
        own = [*group]
        counts = Counter(found.verdict for found in own)
        tallies.append(Tally(*place, tuple(counts[verdict] for verdict in Verdict)))
        numbers += [Numbers(*key, spread(samples)) for key, samples in samples_of(own).items()]
        shown += evidence(own)
        cases |= {(found.subject, found.case_id) for found in own}
        for found in own:
            seconds[place] += found.seconds
            for feature in found.facts.features if found.seconds else ():
                feature_seconds[feature] += found.seconds
        for found in (found for found in own if found.verdict in _TOLD):
            result = found.result
            if result.verdict is Verdict.TIMEOUT:
                timeouts.append(result)
            elif result.verdict is Verdict.UNSUPPORTED:
                refused[*place, result.message] += 1
            else:
                key = (*place, _reason(result), result.link)
                before, simplest = known.get(key, (0, result))
                known[key] = (before + 1, min(simplest, result, key=_simplicity))
    totals = [sum(column) for column in zip(*(tally.counts for tally in tallies), strict=True)]
    counted = CountedRun(run, dict(zip(Verdict, totals or [0] * len(Verdict), strict=True)))
    failing = {tally.subject for tally in tallies if tally.red}
    return Summary(
        of=counted,
        verdicts=tuple(v for v in Verdict if v is Verdict.PASS or counted.counts[v]),
        tallies=tuple(tallies),
        timeouts=tuple(ordered(timeouts)),
        known=tuple(Known(*key, count, simplest) for key, (count, simplest) in sorted(known.items())),
        refusals=tuple(Refusal(*key, count) for key, count in sorted(refused.items())),
        numbers=tuple(sorted(numbers, key=lambda row: (row.subject, row.check, row.dtype, row.output))),
        failed=tuple(found.result for found in shown if found.subject in failing),
        cases=len(cases),
        seconds=dict(seconds),
        feature_seconds=dict(feature_seconds),
    )


def _reason(result: Result) -> str:
    """Return why a failure was expected, without what was found on this one case."""
    return result.message.partition("; found: ")[0]


def _simplicity(result: Result) -> tuple[int, str]:
    return len(result.case.to_json()), result.case.id


def options_of(record: RunRecord) -> str:
    """Return the options of a run in words: profile, seed, shard, and those that narrowed it."""
    number, count = record.shard
    shard = f", shard {number}/{count}" if count > 1 else ""
    narrowed = f", {record.narrowed}" if record.narrowed else ""
    return f"profile {record.profile}, seed {record.seed}{shard}{narrowed}"
