"""Which cases a run poses to a subject: drawn, long, known bugs, production size; by profile and seed."""

import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import Phase, assume
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from conformance.case import Case
from conformance.chance import try_values
from conformance.checks import Check, all_checks
from conformance.corpus import load_corpus
from conformance.production import load_production
from conformance.strategies import HIDING, LONG_LENGTHS, cases, long_cases
from conformance.subject import Subject
from conformance.trial import Trial

_PROFILES = Path(__file__).parent / "profiles.toml"


@dataclass(frozen=True)
class Profile:
    """How much a run asks, by kind of check; see conformance/profiles.toml.

    task_seconds: for one case, where that is not what conformance/runner.toml says.
    """

    name: str
    shrink_evaluations: int
    kinds: Mapping[str, Mapping[str, Any]]
    task_seconds: float | None = None


@dataclass(frozen=True)
class Restriction:
    """What the command line narrows a run to; empty means everything.

    features: all on in every case. dtypes, checks: no others. examples: cases in all, instead of the
    profile's numbers.
    """

    features: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    examples: int | None = None


@dataclass(frozen=True)
class Task:
    """One case for one subject; the checks share what they compute."""

    subject: str
    case: Case
    checks: tuple[str, ...]


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
    if subject.implementation is not None:
        profile = replace(profile, kinds=profile.kinds.get("delegated", profile.kinds))
    wanted = [
        check
        for name, check in all_checks().items()
        if (not only.checks or name in only.checks) and check.applies(subject) is None
    ]
    for kind in dict.fromkeys(check.kind for check in wanted if check.kind in profile.kinds):
        names = tuple(check.name for check in wanted if check.kind == kind)
        posed: set[str] = set()
        for case in _POSED[kind](subject, profile, seed, only):
            if case.id not in posed:
                posed.add(case.id)
                yield Task(subject.name, case, names)


def draw(
    strategy: st.SearchStrategy[Case], count: int, seed: int, accept: Callable[[Case], bool]
) -> list[Case]:
    """The first `count` acceptable cases of a strategy, the same for the same seed.

    Seed 0 is left out: it is that of the simplest case, which Hypothesis may try before it draws anything,
    and which is too simple to find much.
    """
    if count == 0:
        return []
    drawn: list[Case] = []

    def collect(case: Case) -> None:
        assume(case.seed > 0 and accept(case))
        drawn.append(case)

    try:
        try_values(collect, strategy, count, seed, [Phase.generate])
    except Unsatisfiable:
        return drawn
    return drawn[:count]


def _drawn(subject: Subject, profile: Profile, seed: int, only: Restriction) -> Iterator[Case]:
    numbers = profile.kinds["drawn"]
    accept = lambda case: _accepted(subject, case)  # noqa: E731
    for dtype in _dtypes(subject, only):
        salt = _salt(seed, subject.name, dtype, "combined")
        together = cases(subject, dtype, only.features)
        if only.examples is not None:
            share = -(-only.examples // len(_dtypes(subject, only)))
            yield from draw(together, share, salt, accept)
            continue
        for feature in _alone(subject, only, dtype, in_turn=numbers.get("in_turn", False)):
            required = only.features | ({feature} if feature else set())
            alone = cases(subject, dtype, required, combine=False)
            yield from draw(alone, numbers["alone"], _salt(seed, subject.name, dtype, str(feature)), accept)
        yield from draw(together, numbers["combined"], salt, accept)
        if not only.features:
            yield from draw(
                long_cases(subject, dtype),
                numbers["long"] if subject.longest >= min(LONG_LENGTHS) else 0,
                _salt(seed, subject.name, dtype, "long"),
                lambda case: not _unspecified(subject, case),
            )
    if numbers["corpus"]:
        yield from _known("drawn", subject, only)


def _known(kind: str, subject: Subject, only: Restriction) -> Iterator[Case]:
    """The known bugs that a kind of check sees, each in a dtype that the subject takes."""
    if only.examples is not None:
        return
    for entry in load_corpus():
        if entry.kind != kind or not only.features <= entry.case.features:
            continue
        as_reported = entry.case.dtype in subject.dtypes
        case = entry.case if as_reported else replace(entry.case, dtype=subject.dtypes[0])
        if _askable(subject, case, only) and (as_reported or not Trial(subject, case).blind_spots):
            yield case


def _alone(subject: Subject, only: Restriction, dtype: str, in_turn: bool) -> list[str | None]:
    """The features to test one by one in a dtype, None for no feature at all."""
    features: list[str | None] = [None]
    if not only.features:
        features += sorted(subject.features)
    dtypes = _dtypes(subject, only)
    return features[dtypes.index(dtype) :: len(dtypes)] if in_turn else features


def _poisoned(subject: Subject, profile: Profile, seed: int, only: Restriction) -> Iterator[Case]:
    """Each feature that hides keys in turn, spread over the dtypes."""
    hiding = [name for name in HIDING if name in subject.features]
    dtypes = _dtypes(subject, only)
    for number, feature in enumerate(hiding):
        required = frozenset({feature}) | only.features
        dtype = dtypes[number % len(dtypes)]
        strategy = cases(subject, dtype, required, combine=bool(number % 2))
        salt = _salt(seed, subject.name, feature, "poisoned")
        yield from draw(
            strategy, profile.kinds["poisoned"]["examples"], salt, lambda case: _accepted(subject, case)
        )


def _few(kind: str) -> Callable[[Subject, Profile, int, Restriction], Iterator[Case]]:
    def chosen(subject: Subject, profile: Profile, seed: int, only: Restriction) -> Iterator[Case]:
        numbers = profile.kinds[kind]
        dtypes = [d for d in _dtypes(subject, only) if d in numbers.get("dtypes", subject.dtypes)]
        for dtype in dtypes or _dtypes(subject, only)[:1]:
            salt = _salt(seed, subject.name, dtype, kind)
            strategy = cases(subject, dtype, only.features)
            yield from draw(strategy, numbers["examples"], salt, lambda case: _accepted(subject, case))
        if numbers.get("corpus", False):
            yield from _known(kind, subject, only)

    return chosen


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
    "drawn": _drawn,
    "poisoned": _poisoned,
    "repeated": _few("repeated"),
    "transformed": _few("transformed"),
    "refused": _refused,
    "production": _production,
}


def _dtypes(subject: Subject, only: Restriction) -> list[str]:
    return [dtype for dtype in subject.dtypes if not only.dtypes or dtype in only.dtypes]


def _askable(subject: Subject, case: Case, only: Restriction) -> bool:
    return (
        subject.why_not(case) is None
        and (not only.dtypes or case.dtype in only.dtypes)
        and not _unspecified(subject, case)
    )


def _accepted(subject: Subject, case: Case) -> bool:
    return not _unspecified(subject, case) and not Trial(subject, case).blind_spots


def _unspecified(subject: Subject, case: Case) -> bool:
    """Whether the case has empty rows and the subject promises nothing about them (S10)."""
    if subject.semantics.empty_rows != "unspecified":
        return False
    return bool((Trial(subject, case).answer.lse == -float("inf")).any())


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
