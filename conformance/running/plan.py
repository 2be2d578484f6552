"""The plan of a run: the cases for a subject, by profile and seed."""

import sys
import tomllib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import combinations, count
from pathlib import Path
from typing import Any

from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.cases.features import DTYPES, FEATURES
from attest.conformance.checks import Check, all_checks
from attest.conformance.drawing.corpus import load_corpus
from attest.conformance.drawing.covering import Facts, covering_rows, reduced
from attest.conformance.drawing.production import load_production
from attest.conformance.drawing.recipes import Blocks, Offer, class_of, drawing, fillings, model, poisoned
from attest.conformance.judging.trial import Trial
from attest.conformance.subject import Subject, Tiling

_PROFILES = Path(__file__).parent / "profiles.toml"

# Kinds whose cases share programs, and so are posed together, row by row.
_GROUPED = ("drawn", "poisoned", "repeated")
# Logits of the largest case that is looked at before it is posed: larger ones are costly, and seldom blind.
_LOOKED_AT = 40_000
_SHORT_BLOCK = 16  # stands in for the block of a tiling that works in one piece


@dataclass(frozen=True)
class Profile:
    """How much a run asks, by kind of check; see conformance/running/profiles.toml.

    task_seconds: for one case, where that is not what conformance/running/runner.toml says.
    """

    name: str
    shrink_evaluations: int
    kinds: Mapping[str, Mapping[str, Any]]
    task_seconds: float | None = None

    def kinds_for(self, subject: Subject) -> Mapping[str, Mapping[str, Any]]:
        """The kinds of a subject: fewer for one that hands its calls to others."""
        if subject.implementation is None:
            return self.kinds
        return self.kinds.get("delegated", self.kinds)


@dataclass(frozen=True)
class Restriction:
    """What the command line narrows a run to; empty means everything.

    features: all on in every case. dtypes, checks: no others. examples: cases to draw in all, instead of
    the profile's numbers.
    """

    features: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    examples: int | None = None


@dataclass(frozen=True)
class Task:
    """One case for one subject; the checks share what they compute.

    also: more cases with their checks, which share what is compiled.
    """

    subject: str
    case: Case
    checks: tuple[str, ...]
    also: tuple[tuple[Case, tuple[str, ...]], ...] = ()

    @property
    def posed(self) -> tuple[tuple[Case, tuple[str, ...]], ...]:
        """Every case with its checks."""
        return ((self.case, self.checks), *self.also)

    def apart(self) -> Iterator["Task"]:
        """Each case as a task of its own."""
        for case, checks in self.posed:
            yield Task(self.subject, case, checks)


@cache
def profile_names() -> tuple[str, ...]:
    """The profiles that there are."""
    return tuple(tomllib.loads(_PROFILES.read_text()))


def load_profile(name: str) -> Profile:
    """Read one profile. Raises ValueError naming those that there are."""
    if name not in profile_names():
        raise ValueError(f"unknown profile {name!r}: expected one of {', '.join(profile_names())}")
    table = tomllib.loads(_PROFILES.read_text())[name]
    kinds = {kind: numbers for kind, numbers in table.items() if isinstance(numbers, dict)}
    return Profile(name, table["shrink_evaluations"], kinds, table.get("task_seconds"))


def tasks(subject: Subject, profile: Profile, seed: int, only: Restriction = Restriction()) -> Iterator[Task]:
    """Every task of a subject, the same for the same arguments.

    Raises ValueError if the restriction leaves nothing to ask, naming what does not fit.
    """
    _refuse_impossible(subject, only)
    profile = replace(profile, kinds=profile.kinds_for(subject))
    wanted: dict[str, tuple[str, ...]] = {}
    for name, check in all_checks().items():
        asked = not only.checks or name in only.checks
        if asked and check.kind in profile.kinds and check.applies(subject) is None:
            wanted[check.kind] = (*wanted.get(check.kind, ()), name)
    if set(wanted) & set(_GROUPED):
        yield from _unposed(_groups(subject, profile, seed, only, wanted))
    for kind in wanted:
        if kind in _POSED:
            found = _POSED[kind](subject, profile, seed, only)
            yield from _unposed(Task(subject.name, case, wanted[kind]) for case in found)


def _unposed(tasks: Iterator[Task]) -> Iterator[Task]:
    """The tasks without a case that has been posed to the same checks."""
    posed: set[tuple[str, tuple[str, ...]]] = set()
    for task in tasks:
        left: list[tuple[Case, tuple[str, ...]]] = []
        for case, checks in task.posed:
            if (case.id, checks) not in posed:
                posed.add((case.id, checks))
                left.append((case, checks))
        if left:
            yield Task(task.subject, *left[0], also=tuple(left[1:]))


def _groups(
    subject: Subject, profile: Profile, seed: int, only: Restriction, wanted: Mapping[str, tuple[str, ...]]
) -> Iterator[Task]:
    """One task for each row of the covering arrays, then the known bugs."""
    numbers = profile.kinds["drawn"]
    left = sys.maxsize if only.examples is None else only.examples
    for place, (number, row, salt) in enumerate(_rows(subject, numbers, seed, only)):
        drawn = fillings(
            row, _offer(subject, row, number, only), salt, min(numbers["fillings"], left), telling
        )
        drawn = [case for case in drawn if _askable(subject, case, only)]
        left -= len(drawn)
        posed = [(case, "drawn") for case in drawn]
        hidden = poisoned(drawn[0], salt) if drawn else None
        if hidden is not None and _askable(subject, hidden, only):
            posed.append((hidden, "poisoned"))
        repeated = profile.kinds.get("repeated")
        if drawn and repeated is not None and place % repeated["one_in"] == 0:
            posed.append((drawn[-1], "repeated"))
        cases = [(case, wanted[kind]) for case, kind in posed if kind in wanted]
        if cases:
            yield Task(subject.name, *cases[0], also=tuple(cases[1:]))
        if left <= 0:
            return
    if "drawn" in wanted:
        listed = [*(_known("drawn", subject, only) if numbers["corpus"] else ())]
        listed += _edges(subject, only) if numbers["edges"] else ()
        yield from (Task(subject.name, case, wanted["drawn"]) for case in listed)


def _edges(subject: Subject, only: Restriction) -> Iterator[Case]:
    """The listed cases at the ends of what arguments may be, each in a dtype that the subject takes."""
    for number, table in enumerate(drawing()["edges"]):
        case = case_from_json({"dtype": subject.dtypes[number % len(subject.dtypes)], **table})
        promised = subject.semantics.empty_rows == "zero" or not Trial(subject, case).has_empty_rows
        narrowed = only.examples is not None or not only.features <= case.features
        if promised and not narrowed and _askable(subject, case, only):
            yield case


def _rows(
    subject: Subject, numbers: Mapping[str, Any], seed: int, only: Restriction
) -> Iterator[tuple[int, Facts, int]]:
    """(number, facts, seed) of every row of the covering arrays, less what the subject lacks.

    Rows are numbered within their class of lengths.

    A row that holds no pair of facts which the subject has not been asked before is left out. There is no
    end where examples are counted.
    """
    lacking, every = frozenset(FEATURES) - subject.features, model(subject.features)
    numbered: Counter[str] = Counter()
    for array in count() if only.examples is not None else range(numbers["arrays"]):
        salt = _salt(seed, "array", str(array))
        models = [(every, numbers["strength"])]
        if array < numbers["alone"]:
            models.append((replace(every, most=1, also=()), 1))
        for made_of, strength in models:
            seen: set[Facts] = set()
            for index, whole in enumerate(covering_rows(made_of, strength, salt, only.features)):
                for variant, row in enumerate(reduced([whole], lacking, subject.excludes)):
                    held = {frozenset(facts) for facts in combinations(sorted(row), strength)}
                    if only.features <= row and not held <= seen:
                        seen |= held
                        words = (str(array), str(made_of.most), str(index), str(variant))
                        lengths = class_of(row)
                        yield numbered[lengths], row, _salt(seed, *words)
                        numbered[lengths] += 1


def _offer(subject: Subject, row: Facts, number: int, only: Restriction) -> Offer:
    """What the subject takes of a row: one tiling after the other, the last one for long cases."""
    dtypes = _dtypes(subject, only)
    explicit = [index for index, tiling in enumerate(subject.tilings) if tiling.options]
    tilings = explicit if subject.tilings[-1].options else [*explicit, -1]
    if row & {"many", "tall"}:
        # Several blocks both ways: the smaller ones are as good, and cheaper.
        smallest = min(explicit, key=lambda index: _tokens(subject.tilings[index]), default=-1)
        tilings = [smallest, tilings[-1]] if tilings[-1] == -1 else [smallest]
    tiling = -1 if "long" in row else tilings[number % len(tilings)]
    chosen = subject.tilings[tiling]
    return Offer(
        dtype=next((dtype for dtype in dtypes if dtype in row), dtypes[number % len(dtypes)]),
        tiling=tiling,
        blocks=_blocks(chosen) if chosen.options else None,
        head_dims=subject.head_dims,
        longest=subject.longest,
        length_multiple=subject.length_multiple,
        sinks=subject.sinks,
        window_sides=subject.window_sides,
    )


def _blocks(tiling: Tiling) -> Blocks:
    return Blocks(tiling.query_block or _SHORT_BLOCK, tiling.key_block or _SHORT_BLOCK)


def _tokens(tiling: Tiling) -> int:
    blocks = _blocks(tiling)
    return blocks.query * blocks.key


def telling(case: Case) -> bool:
    """Whether the case can tell right from wrong, for a kernel of the standard and of the usual arithmetic.

    The same for every subject, so that cases are; a subject that declares otherwise may find it cannot.
    """
    if case.batch * case.q_heads * case.q_len * case.kv_len > _LOOKED_AT:
        return True
    return _tells(replace(case, tiling=0))


@lru_cache(maxsize=1 << 14)
def _tells(case: Case) -> bool:
    return not Trial(_USUAL, case).blind_spots


def _not_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("what is drawn calls no kernel")


_USUAL = Subject("usual", _not_called, frozenset(FEATURES), dtypes=DTYPES)


def _known(kind: str, subject: Subject, only: Restriction) -> Iterator[Case]:
    """The known bugs that a kind of check sees, each in a dtype that the subject takes."""
    if only.examples is not None:
        return
    for entry in load_corpus():
        if entry.kind != kind or not only.features <= entry.case.features:
            continue
        as_reported = entry.case.dtype in subject.dtypes
        case = entry.case if as_reported else replace(entry.case, dtype=subject.dtypes[0])
        if _askable(subject, case, only) and (as_reported or telling(case)):
            yield case


def _transformed(subject: Subject, profile: Profile, seed: int, only: Restriction) -> Iterator[Case]:
    """The first short rows, with many features each, one after the other in the dtypes of the profile."""
    numbers = profile.kinds["transformed"]
    dtypes = [dtype for dtype in _dtypes(subject, only) if dtype in numbers.get("dtypes", subject.dtypes)]
    numbers = {"strength": 2, "arrays": 1, "alone": 0, **numbers}
    left = numbers["examples"] if only.examples is None else only.examples
    narrowed = replace(only, examples=None, dtypes=tuple(dtypes) or only.dtypes)
    for number, row, salt in _rows(subject, numbers, _salt(seed, "transformed"), narrowed):
        if left > 0 and "long" not in row:
            (case,) = fillings(row, _offer(subject, row, number, narrowed), salt, 1, telling)
            if _askable(subject, case, narrowed):
                left -= 1
                yield case
    if numbers.get("corpus", False):
        yield from _known("transformed", subject, only)


def _refused(subject: Subject, _profile: Profile, _seed: int, only: Restriction) -> Iterator[Case]:
    """One small well-formed call, from which each malformed one is made."""
    low, high = subject.head_dims
    head_dim = min(max(4, low), high)
    dtype = _dtypes(subject, only)[0]
    length = -(-5 // subject.length_multiple) * subject.length_multiple
    yield Case(
        dtype=dtype,
        batch=2,
        q_len=length,
        kv_len=length,
        q_heads=2,
        kv_heads=2,
        head_dim=head_dim,
    )


def _production(subject: Subject, _profile: Profile, _seed: int, only: Restriction) -> Iterator[Case]:
    """The listed problems that the subject takes, with its production blocks."""
    for listed in load_production():
        case = replace(listed, tiling=len(subject.tilings) - 1)
        wanted = only.features <= case.features and case.dtype in _dtypes(subject, only)
        if wanted and subject.why_not(case) is None:
            yield case


_POSED: dict[str, Callable[[Subject, Profile, int, Restriction], Iterator[Case]]] = {
    "transformed": _transformed,
    "refused": _refused,
    "production": _production,
}


def _dtypes(subject: Subject, only: Restriction) -> list[str]:
    return [dtype for dtype in subject.dtypes if not only.dtypes or dtype in only.dtypes]


def _askable(subject: Subject, case: Case, only: Restriction) -> bool:
    return (
        subject.why_not(case) is None
        and (not only.dtypes or case.dtype in only.dtypes)
        and not Trial(subject, case).unspecified
    )


def _salt(seed: int, *words: str) -> int:
    """A seed of its own for each purpose, so that more of one kind moves no other."""
    return zlib.crc32(" ".join((str(seed), *words)).encode())


def _refuse_impossible(subject: Subject, only: Restriction) -> None:
    known: dict[str, Check] = all_checks()
    for name in only.checks:
        if name not in known:
            raise ValueError(f"unknown check {name!r}: known are {', '.join(sorted(known))}")
    missing = sorted(only.features - subject.features)
    if missing:
        raise ValueError(f"subject {subject.name} does not declare {', '.join(missing)}")
    if not _dtypes(subject, only):
        raise ValueError(
            f"subject {subject.name} takes {', '.join(subject.dtypes)}, not {', '.join(only.dtypes)}"
        )
