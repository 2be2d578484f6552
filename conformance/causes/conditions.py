"""Conditions that failing cases meet and passing ones do not: features, dtypes, lengths."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from attest.conformance.cases.case import Case
from attest.conformance.cases.features import ALL_FEATURES, DTYPES

# A condition explains failures if at least this part of the cases that meet it fails, and the part of the
# others is smaller by this.
_PURE = 0.75
_LIFT = 0.5
# All failing cases meet a condition that has nothing to do with them at most so often.
_ACCIDENT = 0.02
_MORE_KEYS, _MORE_QUERIES = "more keys than queries", "more queries than keys"


@dataclass(frozen=True)
class Condition:
    """A condition on cases in words, with the clauses of its features.

    facts: of `facts_of`; a case that has all of them meets the condition.
    fails, cases: how many of the cases that meet it fail. other_fails, other_cases: the same of the others.
    """

    words: str
    clauses: tuple[str, ...]
    facts: frozenset[str]
    fails: int
    cases: int
    other_fails: int
    other_cases: int

    def met(self, case: Case) -> bool:
        """Return whether a case meets the condition."""
        return self.facts <= facts_of(case)

    @property
    def sufficient(self) -> bool:
        """Whether most cases that meet it fail, and few others."""
        if not self.fails or not self.other_cases:
            return False
        with_it, without = self.fails / self.cases, self.other_fails / self.other_cases
        return with_it >= _PURE and with_it - without >= _LIFT

    @property
    def necessary(self) -> bool:
        """Whether all failing cases meet it, and chance would hardly let them."""
        every = self.cases + self.other_cases
        return not self.other_fails and (self.cases / every) ** self.fails <= _ACCIDENT

    @property
    def sentence(self) -> str:
        """The counts in one sentence."""
        counts = f"fails {self.fails} of {self.cases} {'case' if self.cases == 1 else 'cases'} {self.words}"
        return f"{counts}, {self.other_fails} of {self.other_cases} without" if self.other_cases else counts


def explaining(failing: Sequence[Case], judged: Sequence[Case]) -> tuple[Condition, tuple[Case, ...]] | None:
    """Return the condition that best explains failing cases, and those that meet it; None if none does.

    judged: every case of the same checks, the failing ones among them. The simplest condition that all
    failing cases meet comes first, and then the one that explains most of them.
    """
    best: tuple[tuple[bool, bool, int, float], Condition] | None = None
    bad = [facts_of(case) for case in failing]
    every = [facts_of(case) for case in judged]
    for words, clauses, facts in _candidates(bad):
        fails, cases = (sum(facts <= others for others in those) for those in (bad, every))
        found = Condition(
            words,
            clauses,
            facts,
            fails=fails,
            cases=cases,
            other_fails=len(bad) - fails,
            other_cases=len(every) - cases,
        )
        if not (found.sufficient or found.necessary):
            continue
        rank = (fails == len(bad), found.sufficient, -len(clauses), fails / cases)
        if best is None or rank > best[0]:
            best = (rank, found)
    if best is None:
        return None
    return best[1], tuple(case for case in failing if best[1].met(case))


def facts_of(case: Case) -> frozenset[str]:
    """Return what conditions are made of: the features of a case, its dtype, and which length is larger."""
    lengths = (
        {_MORE_KEYS} if case.kv_len > case.q_len else {_MORE_QUERIES} if case.kv_len < case.q_len else ()
    )
    return case.features | {case.dtype, *lengths}


def _candidates(failing: Iterable[frozenset[str]]) -> Iterator[tuple[str, tuple[str, ...], frozenset[str]]]:
    """Yield words, clauses and facts of conditions that failing cases may meet, the simple ones first."""
    names = sorted(frozenset[str]().union(*failing) & set(ALL_FEATURES))
    for name in names:
        yield f"with {name}", (ALL_FEATURES[name].clause,), frozenset({name})
    for dtype in DTYPES:
        yield f"in {dtype}", ("S16",), frozenset({dtype})
    yield f"with {_MORE_KEYS}", ("S6",), frozenset({_MORE_KEYS})
    yield f"with {_MORE_QUERIES}", ("S10",), frozenset({_MORE_QUERIES})
    for one, other in combinations(names, 2):
        clauses = (ALL_FEATURES[one].clause, ALL_FEATURES[other].clause)
        yield f"with {one} and {other}", clauses, frozenset({one, other})
