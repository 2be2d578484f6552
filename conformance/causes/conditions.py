"""What failing cases have in common and passing ones lack: features, dtypes, shapes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from attest.conformance.cases.case import Case
from attest.conformance.cases.features import ALL_FEATURES, DTYPES

# A condition explains failures if at least this part of the cases that meet it fails, and the part of the
# others is smaller by this.
_PURE = 0.75
_LIFT = 0.5
# All failing cases meet a condition that has nothing to do with them at most so often.
_ACCIDENT = 0.02


@dataclass(frozen=True)
class Condition:
    """A condition on cases in words, with the clause of its feature; several are met together.

    fails, cases: how many of the cases that meet it fail. other_fails, other_cases: the same of the others.
    """

    words: str
    clauses: tuple[str, ...]
    fails: int
    cases: int
    other_fails: int
    other_cases: int
    met: Callable[[Case], bool] = field(compare=False, repr=False)

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


type _Named = tuple[str, tuple[str, ...], Callable[[Case], bool]]


def explaining(failing: Sequence[Case], judged: Sequence[Case]) -> tuple[Condition, tuple[Case, ...]] | None:
    """Return the condition that best explains failing cases, and those that meet it; None if none does.

    judged: every case of the same checks, the failing ones among them. The simplest condition that all
    failing cases meet comes first, and then the one that explains most of them.
    """
    best: tuple[tuple[bool, bool, int, float], Condition, tuple[Case, ...]] | None = None
    bad = set(failing)
    for words, clauses, met in _candidates(failing):
        hit = tuple(case for case in failing if met(case))
        with_it = [case for case in judged if met(case)]
        found = Condition(
            words,
            clauses,
            fails=len(hit),
            cases=len(with_it),
            other_fails=len(bad) - len(hit),
            other_cases=len(judged) - len(with_it),
            met=met,
        )
        if not (found.sufficient or found.necessary):
            continue
        rank = (len(hit) == len(failing), found.sufficient, -len(clauses), len(hit) / len(with_it))
        if best is None or rank > best[0]:
            best = (rank, found, hit)
    return None if best is None else best[1:]


def _candidates(failing: Sequence[Case]) -> Iterator[_Named]:
    """Yield the conditions that some failing case meets, the simple ones first."""
    names = sorted({name for case in failing for name in case.features})
    for name in names:
        yield f"with {name}", (ALL_FEATURES[name].clause,), lambda case, name=name: name in case.features
    for dtype in DTYPES:
        yield f"in {dtype}", ("S16",), lambda case, dtype=dtype: case.dtype == dtype
    yield "with more keys than queries", ("S6",), lambda case: case.kv_len > case.q_len
    yield "with more queries than keys", ("S10",), lambda case: case.kv_len < case.q_len
    for one, other in combinations(names, 2):
        clauses = (ALL_FEATURES[one].clause, ALL_FEATURES[other].clause)
        yield f"with {one} and {other}", clauses, lambda case, both={one, other}: both <= case.features
