"""The results of one check of a subject in two runs, reduced to what a comparison shows."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from attest.conformance.record import Verdict
from attest.reports.found import Found, Place, evidence
from attest.reports.pairing import Fate, Match, Pair, by_key, matches
from attest.reports.rows import Row, Shift, rows, shifts
from attest.reports.spread import samples_of


@dataclass(frozen=True)
class Terms:
    """The terms of a comparison, the same for all its parts.

    drawn_alike: whether both runs drew the same cases. other_blocks: the subjects with other block sizes in
    head.
    """

    drawn_alike: bool
    other_blocks: Collection[str]


@dataclass(frozen=True)
class Part:
    """The results of one check of a subject in both runs.

    both: how many results both have. counts: how many results of each verdict base has, and head.
    pairs: those of which more than their number is told: all that changed, and all that fails in head.
    rows, shifts: their numbers. missing: the passing cases that lack an output which base measured, by dtype
    and output. gone: the cases of base that passed with a dtype or a feature with which head judged none.
    outputs: of base and of head; None for a run without any result. hung: the cases that ran out of time in
    head. evidence: what fails in head, and what passes beside it.
    """

    place: Place
    both: int
    counts: tuple[Counter[Verdict], Counter[Verdict]]
    pairs: tuple[Pair, ...]
    rows: tuple[Row, ...]
    shifts: tuple[Shift, ...]
    missing: Mapping[tuple[str, str], int]
    gone: Mapping[str, int]
    outputs: tuple[frozenset[str] | None, frozenset[str] | None]
    hung: frozenset[str]
    evidence: Sequence[Found]


def part_of(place: Place, base: Sequence[Found], head: Sequence[Found], terms: Terms) -> Part:
    """Compare the results of one check of a subject."""
    before, after = by_key(base), by_key(head)
    found = matches(before, after, terms.drawn_alike)
    other_blocks = place[0] in terms.other_blocks
    of_case = {match.case_id: match for match in found}
    old, new = samples_of(before.values()), samples_of(after.values())
    return Part(
        place=place,
        both=sum(match.base is not None and match.head is not None for match in found),
        counts=(_counts(base), _counts(head)),
        pairs=tuple(match.pair(other_blocks) for match in found if _told(match)),
        rows=tuple(rows(old, new, other_blocks)),
        shifts=tuple(shifts(old, new, other_blocks, lambda case: of_case[case].pair(other_blocks))),
        missing=_missing(found),
        gone=_gone(before.values(), after.values()),
        outputs=(_outputs(base), _outputs(head)),
        hung=frozenset(each.case_id for each in head if each.verdict is Verdict.TIMEOUT),
        evidence=evidence(head),
    )


def _counts(found: Sequence[Found]) -> Counter[Verdict]:
    return Counter(each.verdict for each in found)


def _told(match: Match) -> bool:
    return match.fate is not Fate.SAME or (match.head is not None and match.head.verdict.red)


def _missing(found: Sequence[Match]) -> Counter[tuple[str, str]]:
    missing: Counter[tuple[str, str]] = Counter()
    for match in found:
        if match.base is None or match.head is None or match.head.verdict is not Verdict.PASS:
            continue
        had, has = ([numbers.output for numbers in side.counted] for side in (match.base, match.head))
        if had != has:
            missing.update((match.head.facts.dtype, output) for output in {*had} - {*has})
    return missing


def _gone(before: Collection[Found], after: Collection[Found]) -> Counter[str]:
    """Count the passing cases of base by what head tried none of, a dtype or a feature."""
    tried = {name for each in after if _judged(each.verdict) for name in _names(each)}
    passed = Counter(name for each in before if each.verdict is Verdict.PASS for name in _names(each))
    return Counter({name: count for name, count in passed.items() if name not in tried})


def _judged(verdict: Verdict) -> bool:
    return verdict is Verdict.PASS or verdict.red


def _names(found: Found) -> tuple[str, ...]:
    return (found.facts.dtype, *found.facts.features)


def _outputs(found: Sequence[Found]) -> frozenset[str] | None:
    return frozenset(numbers.output for each in found for numbers in each.measurements) if found else None
