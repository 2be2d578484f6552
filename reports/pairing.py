"""The pairing of the results of two runs, and what became of each verdict.

Results belong together if subject, check and case are the same; a case is named by its content, so that both
results are of the same arrays.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from attest.conformance.record import Result, RunRecord, Verdict
from attest.reports.found import Found, groups, of_results
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


class Match(msgspec.Struct, frozen=True, gc=False):
    """A Pair whose results are not yet read in full."""

    case_id: str
    base: Found | None
    head: Found | None
    fate: Fate

    def pair(self, other_blocks: bool) -> Pair:
        """Return the results of both runs."""
        base, head = (side and side.result for side in (self.base, self.head))
        return Pair(self.case_id, base, head, self.fate, other_blocks)


def matches(
    before: Mapping[ResultKey, Found], after: Mapping[ResultKey, Found], drawn_alike: bool
) -> list[Match]:
    """Return every result of one subject and check in either run beside that of the other, in order.

    before, after: in the order of a record. drawn_alike: whether both runs drew the same cases. `unreached`
    must see the pairs of all checks.
    """
    drawn_alike = drawn_alike and not redrawn(before, after)
    alike = before.keys() == after.keys()
    return [
        Match(
            case_id=key[2],
            base=before.get(key),
            head=after.get(key),
            fate=_fate(before.get(key), after.get(key), drawn_alike),
        )
        for key in (before if alike else sorted(before.keys() | after.keys()))
    ]


def pair(base: RunRecord, head: RunRecord) -> tuple[Pair, ...]:
    """Return every result of either run beside that of the other, in order."""
    drawn_alike, other_blocks = same_draw(base, head), with_other_blocks(base, head)
    pairs = (
        match.pair(place[0] in other_blocks)
        for place, before, after in groups(of_results(base.results), of_results(head.results))
        for match in matches(by_key(before), by_key(after), drawn_alike)
    )
    return unreached(pairs, {(r.subject, r.case.id) for r in head.results if r.verdict is Verdict.TIMEOUT})


def unreached(pairs: Iterable[Pair], hung: Collection[tuple[str, str]]) -> tuple[Pair, ...]:
    """Return pairs with the fate of those that were not judged, since another check ran out of time.

    hung: subjects and cases that ran out of time in head.
    """
    return tuple(
        replace(pair, fate=Fate.UNREACHED) if pair.head is None and pair.key[::2] in hung else pair
        for pair in pairs
    )


def with_other_blocks(base: RunRecord, head: RunRecord) -> frozenset[str]:
    """Return the subjects that declare other block sizes in head than in base; both records name them."""
    before, after = (setting(record, "block_sizes") for record in (base, head))
    return frozenset(subject for subject in before.keys() & after.keys() if before[subject] != after[subject])


def redrawn(before: Mapping[ResultKey, Found], after: Mapping[ResultKey, Found]) -> bool:
    """Return whether at least as many cases of a check are new as passed and are gone.

    The cases depend on what a subject declares: with another list of block sizes, it gets others.
    """
    gone = sum(found.verdict is Verdict.PASS for key, found in before.items() if key not in after)
    return 0 < gone <= sum(found.drawn for key, found in after.items() if key not in before)


def by_key(results: Iterable[Found]) -> dict[ResultKey, Found]:
    """Return the worst result of each key.

    The results of searches that the clock cut off are left out: another machine finds others.
    """
    worst: dict[ResultKey, Found] = {}
    for found in results:
        if not found.cut:
            key = (found.subject, found.check, found.case_id)
            known = worst.setdefault(key, found)
            if known is not found and _rank(found) >= _rank(known):
                worst[key] = found
    return worst


def _rank(found: Found) -> tuple[int, bool, str, str]:
    """Return what decides which of two results of one key counts: the larger."""
    result = found.result
    return (-_SEVERITY.index(result.verdict), result.minimal, result.message, repr(result.measurements))


def _fate(base: Found | None, head: Found | None, drawn_alike: bool) -> Fate:
    before = base.verdict if base else None
    after = head.verdict if head else None
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
