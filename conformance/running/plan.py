"""The plan of a run: the cases for a subject, by profile and seed."""

import sys
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.checks import Check, all_checks, unknown_check
from attest.conformance.drawing.corpus import load_corpus
from attest.conformance.drawing.production import load_production
from attest.conformance.drawing.recipes import model
from attest.conformance.drawing.tables import drawing
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import (
    CONFIGURATION,
    DRAWN,
    LAWS,
    POISONED,
    PRODUCTION,
    REFUSED,
    REPEATED,
    SHARDED,
    TRANSFORMED,
    Kind,
)
from attest.conformance.running.choice import Draw, Filling, IfSensitive, chosen, first_try
from attest.conformance.running.rows import Row, offer_of, rows_of, salt
from attest.conformance.subject import Subject

_PROFILES = Path(__file__).parent / "profiles.toml"
_SHARDED = Path(__file__).parent / "sharded.toml"
_SPREAD = Path(__file__).parent / "spread.toml"

# Classes of lengths that are too long for a call that is transformed in many ways.
_LONG = frozenset({"long", "wide", "deep"})
_SHORT_CALL, _CALL_OF_BLOCKS = 5, 40  # tokens


@dataclass(frozen=True)
class Profile:
    """The number of cases of a run, by kind of check; see conformance/running/profiles.toml.

    task_seconds: for one case, if it differs from the limit of conformance/process/limits.toml.
    """

    name: str
    shrink_evaluations: int
    kinds: Mapping[str, Mapping[str, Any]]
    task_seconds: float | None = None

    def kinds_for(self, subject: Subject) -> Mapping[str, Mapping[str, Any]]:
        """Return the kinds for a subject: fewer for one that passes its calls on to other kernels.

        Fewest for one that differs from such a subject in its configuration alone.
        """
        if subject.sharding.sequence:
            return self.kinds.get("spread", self.kinds)
        if subject.implementation is None:
            return self.kinds
        delegated = self.kinds.get("delegated", self.kinds)
        return self.kinds.get("configured", delegated) if subject.ways else delegated


@dataclass(frozen=True)
class Restriction:
    """The part that the command line narrows a run to; empty means everything.

    features: all on in every case. dtypes, checks: only these. examples: the total number of cases to draw,
    instead of the profile's numbers.
    """

    features: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    examples: int | None = None


@dataclass(frozen=True)
class Task:
    """One draw for one subject; the checks share what they compute.

    also: more draws with their checks, which share what is compiled.
    """

    subject: str
    draw: Draw
    checks: tuple[str, ...]
    also: tuple[tuple[Draw, tuple[str, ...]], ...] = ()

    @property
    def draws(self) -> tuple[tuple[Draw, tuple[str, ...]], ...]:
        """Every draw with its checks."""
        return ((self.draw, self.checks), *self.also)

    @property
    def cases(self) -> tuple[tuple[Case, tuple[str, ...]], ...]:
        """Every case with its checks, chosen with the oracle."""
        cases = ((chosen(draw), checks) for draw, checks in self.draws)
        return tuple((case, checks) for case, checks in cases if case is not None)

    @property
    def case(self) -> Case:
        """The first case."""
        return self.cases[0][0]

    def apart(self) -> Iterator["Task"]:
        """Yield each case as a task of its own."""
        for case, checks in self.cases:
            yield Task(self.subject, case, checks)


@cache
def profile_names() -> tuple[str, ...]:
    """Return the names of all profiles."""
    return tuple(tomllib.loads(_PROFILES.read_text()))


def load_profile(name: str) -> Profile:
    """Read one profile. Raises ValueError that names the known ones."""
    if name not in profile_names():
        raise ValueError(f"unknown profile {name!r}: expected one of {', '.join(profile_names())}")
    table = tomllib.loads(_PROFILES.read_text())[name]
    kinds = {kind: numbers for kind, numbers in table.items() if isinstance(numbers, dict)}
    return Profile(name, table["shrink_evaluations"], kinds, table.get("task_seconds"))


def tasks(subject: Subject, profile: Profile, seed: int, only: Restriction = Restriction()) -> Iterator[Task]:
    """Yield every task of a subject, the same for the same arguments.

    Raises ValueError if the restriction leaves no case; the message names what does not fit.
    """
    _refuse_impossible(subject, only)
    profile = replace(profile, kinds=profile.kinds_for(subject))
    wanted: dict[Kind, tuple[str, ...]] = {}
    for name, check in all_checks().items():
        wanted_here = not only.checks or name in only.checks
        if wanted_here and check.kind.table in profile.kinds and check.applies(subject) is None:
            wanted[check.kind] = (*wanted.get(check.kind, ()), name)
    if any(kind.by_row for kind in wanted):
        yield from _without_repeats(_groups(subject, profile, seed, only, wanted))
    for kind in wanted:
        if kind in _DRAWS:
            for checks in [(name,) for name in wanted[kind]] if kind.apart else [wanted[kind]]:
                found = _DRAWS[kind](subject, profile, salt(seed, *checks) if kind.apart else seed, only)
                yield from _without_repeats(Task(subject.name, draw, checks) for draw in found)


def _without_repeats(tasks: Iterator[Task]) -> Iterator[Task]:
    """Yield the tasks without the draws that an earlier task has, with the same checks."""
    planned: set[tuple[Draw, tuple[str, ...]]] = set()
    for task in tasks:
        left: list[tuple[Draw, tuple[str, ...]]] = []
        for draw in task.draws:
            if draw not in planned:
                planned.add(draw)
                left.append(draw)
        if left:
            yield Task(task.subject, *left[0], also=tuple(left[1:]))


def _groups(
    subject: Subject, profile: Profile, seed: int, only: Restriction, wanted: Mapping[Kind, tuple[str, ...]]
) -> Iterator[Task]:
    """Yield one task for each row of the covering arrays, then the known bugs."""
    numbers = profile.kinds[DRAWN.table]
    left = sys.maxsize if only.examples is None else only.examples
    rows = _rows(subject, numbers, seed, only)
    if only.examples is None and "last" in numbers:
        rows = deque(rows, numbers["last"])
    for place, row in enumerate(rows):
        offer = offer_of(subject, row, _dtypes(subject, only))
        fillings = (
            Filling(row.facts, offer, row.seed, filling) for filling in range(min(numbers["fillings"], left))
        )
        drawn = [filling for filling in fillings if _is_supported(subject, filling, only)]
        left -= len(drawn)
        planned = [(filling, DRAWN) for filling in drawn]
        hidden = replace(drawn[0], poison=True) if drawn else None
        if hidden is not None and _is_supported(subject, hidden, only):
            planned.append((hidden, POISONED))
        repeated = profile.kinds.get(REPEATED.table)
        if drawn and repeated is not None and place % repeated["one_in"] == 0:
            planned.append((drawn[-1], REPEATED))
        draws = [(filling, wanted[kind]) for filling, kind in planned if kind in wanted]
        if draws:
            yield Task(subject.name, *draws[0], also=tuple(draws[1:]))
        if left <= 0:
            return
    if DRAWN in wanted:
        listed: list[Draw] = [*(_known(DRAWN, subject, only) if numbers["corpus"] else ())]
        listed += _edges(subject, numbers["edges"], only)
        listed += _spread(subject, only)
        yield from (Task(subject.name, draw, wanted[DRAWN]) for draw in listed)


def _edges(subject: Subject, which: str, only: Restriction) -> Iterator[Case]:
    """Yield the listed cases at the limits of arguments, each in a dtype that the subject supports.

    which: "all", "none", or "quick": those that are marked so.
    """
    for number, table in drawing()["edges"].items():
        fields = dict(table)
        marked = fields.pop("quick", False)
        if which == "none" or (which == "quick" and not marked):
            continue
        case = case_from_json({"dtype": subject.dtypes[number % len(subject.dtypes)], **fields})
        promised = subject.semantics.empty_rows == "zero" or not Trial(subject, case).has_empty_rows
        narrowed = only.examples is not None or not only.features <= case.features
        if promised and not narrowed and _is_supported(subject, case, only):
            yield case


def _spread(subject: Subject, only: Restriction) -> Iterator[Case]:
    """Yield the listed calls for the first tiling of each strategy of a subject that spreads the sequence."""
    if not subject.sharding.sequence or only.examples is not None:
        return
    strategies: dict[Any, int] = {}
    for index, tiling in enumerate(subject.tilings):
        strategies.setdefault(tiling.options.get("strategy"), index)
    for number, table in enumerate(tomllib.loads(_SPREAD.read_text())["case"]):
        for turn, tiling in enumerate(strategies.values()):
            dtype = subject.dtypes[(number + turn) % len(subject.dtypes)]
            case = case_from_json({"dtype": dtype, "tiling": tiling, **table})
            if only.features <= case.features and _is_supported(subject, case, only):
                yield case


def _rows(subject: Subject, numbers: Mapping[str, Any], seed: int, only: Restriction) -> Iterator[Row]:
    return rows_of(subject, numbers, seed, only.features, endless=only.examples is not None)


def _known(kind: Kind, subject: Subject, only: Restriction) -> Iterator[Draw]:
    """Yield the known bugs that a kind of check finds, each in a dtype that the subject supports."""
    if only.examples is not None:
        return
    for entry in load_corpus():
        if entry.kind != kind.table or not only.features <= entry.case.features:
            continue
        as_reported = entry.case.dtype in subject.dtypes
        draw = entry.case if as_reported else IfSensitive(replace(entry.case, dtype=subject.dtypes[0]))
        if _is_supported(subject, draw, only):
            yield draw


def _transformed(
    subject: Subject, profile: Profile, seed: int, only: Restriction, kind: Kind = TRANSFORMED
) -> Iterator[Draw]:
    """Yield the first short rows, each with many features, in turn in the dtypes of the profile."""
    numbers = profile.kinds[kind.table]
    dtypes = [dtype for dtype in _dtypes(subject, only) if dtype in numbers.get("dtypes", subject.dtypes)]
    numbers = {"strength": 2, "arrays": 1, "alone": 0, **numbers}
    planned = "named" if only.checks and "named" in numbers else "examples"
    most = numbers[planned] if only.examples is None else only.examples
    narrowed = replace(only, examples=None, dtypes=tuple(dtypes) or only.dtypes)
    rows = _rows(subject, numbers, salt(seed, "transformed"), narrowed)
    drawn = (
        Filling(row.facts, offer_of(subject, row, _dtypes(subject, narrowed)), row.seed)
        for row in rows
        if not row.facts & _LONG
    )
    yield from islice((filling for filling in drawn if _is_supported(subject, filling, narrowed)), most)
    if numbers.get("corpus", False):
        yield from _known(kind, subject, only)


def _refused(subject: Subject, _profile: Profile, _seed: int, only: Restriction) -> Iterator[Case]:
    """Yield one small well-formed call, from which each malformed one is made."""
    yield _plain_call(subject, only, _SHORT_CALL)


def _configured(subject: Subject, _profile: Profile, _seed: int, only: Restriction) -> Iterator[Case]:
    """Yield one call of several blocks, so that its program shows their sizes."""
    yield _plain_call(subject, only, _CALL_OF_BLOCKS)


def _plain_call(subject: Subject, only: Restriction, tokens: int) -> Case:
    (low, high), limits = subject.head_dims, subject.limits
    head_dim = -(-min(max(4, low), high) // limits.head_dim_multiple) * limits.head_dim_multiple
    dtype = _dtypes(subject, only)[0]
    length = -(-tokens // limits.length_multiple) * limits.length_multiple
    return Case(
        dtype=dtype,
        batch=2,
        q_len=length,
        kv_len=length,
        q_heads=2,
        kv_heads=2,
        head_dim=head_dim,
    )


def _production(subject: Subject, _profile: Profile, _seed: int, only: Restriction) -> Iterator[Case]:
    """Yield the listed problems that the subject supports, with its production blocks."""
    for listed in load_production():
        case = replace(listed, tiling=len(subject.tilings) - 1)
        wanted = only.features <= case.features and case.dtype in _dtypes(subject, only)
        if wanted and subject.why_not(case) is None:
            yield case


def _sharded(subject: Subject, _profile: Profile, _seed: int, only: Restriction) -> Iterator[Case]:
    """Yield the listed calls that the subject supports on several devices, in turn in its dtypes."""
    dtypes, tilings = _dtypes(subject, only), len(subject.tilings)
    for number, table in enumerate(tomllib.loads(_SHARDED.read_text())["case"]):
        listed = case_from_json({"dtype": dtypes[number % len(dtypes)], **table})
        case = replace(listed, tiling=number % tilings)
        declared = only.features <= case.features <= subject.sharding.features
        if declared and subject.why_not(case) is None:
            yield case


_DRAWS: dict[Kind, Callable[[Subject, Profile, int, Restriction], Iterator[Draw]]] = {
    TRANSFORMED: _transformed,
    LAWS: partial(_transformed, kind=LAWS),
    REFUSED: _refused,
    PRODUCTION: _production,
    SHARDED: _sharded,
    CONFIGURATION: _configured,
}


def _dtypes(subject: Subject, only: Restriction) -> list[str]:
    return [dtype for dtype in subject.dtypes if not only.dtypes or dtype in only.dtypes]


def _is_supported(subject: Subject, draw: Draw, only: Restriction) -> bool:
    """Return whether the subject supports a draw, in a dtype of the run, and declares results for it."""
    case = first_try(draw)
    if case is None or subject.why_not(case) is not None or (only.dtypes and case.dtype not in only.dtypes):
        return False
    if subject.semantics.empty_rows != "unspecified":
        return True
    # Which rows see no key depends on the values. Only for such a dialect is a case chosen here, too.
    case = chosen(draw)
    return case is not None and not Trial(subject, case).unspecified


def _refuse_impossible(subject: Subject, only: Restriction) -> None:
    known: dict[str, Check] = all_checks()
    for name in only.checks:
        if name not in known:
            raise ValueError(unknown_check(name))
    missing = sorted(only.features - subject.features)
    if missing:
        raise ValueError(f"--feature: subject {subject.name} does not declare {', '.join(missing)}")
    for apart in model(subject.features).excludes:
        if apart <= only.features:
            raise ValueError(f"--feature: no case combines {' and '.join(sorted(apart))}: remove one of them")
    if not _dtypes(subject, only):
        raise ValueError(
            f"--dtype: got {', '.join(only.dtypes)}, {subject.name} declares {', '.join(subject.dtypes)}"
        )
