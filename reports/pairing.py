"""The pairing of the results of two runs, and what became of each verdict.

Results belong together if subject, check and case are the same; a case is named by its content, so that both
results are of the same arrays.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from attest.conformance.record import Result, RunRecord, Verdict
from attest.reports.words import setting

# From the worst; where a record has two results of one key, the worst counts.
_SEVERITY = (
    Verdict.ERROR,
    Verdict.FAIL,
    Verdict.TIMEOUT,
    Verdict.XPASS,
    Verdict.XFAIL,
    Verdict.INCONCLUSIVE,
    Verdict.UNSUPPORTED,
    Verdict.PASS,
)


class Fate(StrEnum):
    """The fate of a verdict."""

    SAME = "same"
    BROKEN = "broken"  # red, and was not
    LOST = "lost"  # passed, and is no longer known to pass
    TIMED_OUT = "timed out"  # ran out of time, and did not before
    UNREACHED = "unreached"  # not judged, since another check of its case ran out of time
    FIXED = "fixed"  # passes, and was known to fail
    CHANGED = "changed"  # neither better nor worse
    NEW = "new"  # only in head, and not red
    GONE = "gone"  # only in base, and no loss: it did not pass, or other cases were drawn in its place

    @property
    def regressed(self) -> bool:
        """Whether one such pair is a regression."""
        return self in (Fate.BROKEN, Fate.LOST, Fate.TIMED_OUT)


ResultKey = tuple[str, str, str]


@dataclass(frozen=True)
class Pair:
    """The results of both runs by one key; None where a run has none.

    other_blocks: whether the subject declares other block sizes in head.
    """

    case_id: str
    base: Result | None
    head: Result | None
    fate: Fate
    other_blocks: bool = False

    @property
    def result(self) -> Result:
        """The newer of the results."""
        result = self.head or self.base
        assert result is not None
        return result

    @property
    def key(self) -> ResultKey:
        """Subject, check, case: the order of pairs."""
        return (self.result.subject, self.result.check, self.case_id)

    @property
    def group(self) -> tuple[str, str, str]:
        """Subject, check, dtype: what a regression is counted by."""
        return (self.result.subject, self.result.check, self.result.case.dtype)

    @property
    def before(self) -> str:
        """The verdict of base in a word."""
        return self.base.verdict.value if self.base else "-"

    @property
    def after(self) -> str:
        """The verdict of head in a word."""
        return self.head.verdict.value if self.head else "-"


def ordered(results: Iterable[Result]) -> list[Result]:
    """Return results in the order of every report, whatever order they were found in."""
    return sorted(results, key=lambda r: (*r.sort_key, r.minimal, r.message, repr(r.measurements)))


def same_draw(base: RunRecord, head: RunRecord) -> bool:
    """Return whether both runs drew the same cases, so that a missing one was dropped."""
    return (base.profile, base.seed) == (head.profile, head.seed) and same_extent(base, head)


def same_extent(base: RunRecord, head: RunRecord) -> bool:
    """Return whether both runs are the same part of their profile."""
    return (base.narrowed, base.shard) == (head.narrowed, head.shard)


def pair(base: RunRecord, head: RunRecord) -> tuple[Pair, ...]:
    """Return every result of either run beside that of the other, in order."""
    drawn_alike = same_draw(base, head)
    before, after = by_key(base.results), by_key(head.results)
    hung = {(r.subject, r.case.id) for r in head.results if r.verdict is Verdict.TIMEOUT}
    redrawn, changed_blocks = _redrawn(before, after), with_other_blocks(base, head)
    return tuple(
        Pair(
            case_id=key[2],
            base=before.get(key),
            head=after.get(key),
            fate=_fate(
                before.get(key),
                after.get(key),
                drawn_alike and key[:2] not in redrawn,
                (key[0], key[2]) in hung,
            ),
            other_blocks=key[0] in changed_blocks,
        )
        for key in sorted(before.keys() | after.keys())
    )


def with_other_blocks(base: RunRecord, head: RunRecord) -> frozenset[str]:
    """Return the subjects that declare other block sizes in head than in base; both records name them."""
    before, after = (setting(record, "block_sizes") for record in (base, head))
    return frozenset(subject for subject in before.keys() & after.keys() if before[subject] != after[subject])


def _redrawn(before: Mapping[ResultKey, Result], after: Mapping[ResultKey, Result]) -> set[tuple[str, str]]:
    """Return the subjects and checks of which at least as many cases are new as passed and are gone.

    The cases depend on what a subject declares: with another list of block sizes, it gets others.
    """
    gone = Counter(
        key[:2] for key, result in before.items() if key not in after and result.verdict is Verdict.PASS
    )
    new = Counter(key[:2] for key, result in after.items() if key not in before and result.drawn)
    return {place for place, count in gone.items() if new[place] >= count}


def by_key(results: Iterable[Result]) -> dict[ResultKey, Result]:
    """Return the worst result of each key.

    The results of searches that the clock cut off are left out: another machine finds others.
    """
    worst_last = sorted(
        ordered(result for result in results if not result.cut), key=lambda r: -_SEVERITY.index(r.verdict)
    )
    return {result.key: result for result in worst_last}


def _fate(base: Result | None, head: Result | None, drawn_alike: bool, hung: bool) -> Fate:
    before = base.verdict if base else None
    after = head.verdict if head else None
    if after is None and hung:
        return Fate.UNREACHED
    if after is None:
        return Fate.LOST if before is Verdict.PASS and drawn_alike else Fate.GONE
    if before is after:
        return Fate.SAME
    if after is Verdict.TIMEOUT and (before is None or before is Verdict.XPASS or not before.red):
        return Fate.TIMED_OUT
    if after.red:
        known = before is not None and before.red and before is not Verdict.XPASS
        return Fate.CHANGED if known else Fate.BROKEN
    if before is None:
        return Fate.NEW
    if before is Verdict.PASS:
        return Fate.LOST
    known_to_fail = before.red or before is Verdict.XFAIL
    return Fate.FIXED if after is Verdict.PASS and known_to_fail else Fate.CHANGED
