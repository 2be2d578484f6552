"""The parts of a law: the calls that it compares, and the equations between their outputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.build import Built
from attest.conformance.cases.case import Case
from attest.conformance.drawing.strategies import without
from attest.conformance.judging.trial import Trial
from attest.conformance.subject import Subject
from attest.reference.semantics import STANDARD, Semantics

Array = NDArray[Any]
Outputs = Mapping[str, Array]
# From the outputs of every call. The function applies to each coefficient: abs where the outputs are bounds.
Side = Callable[[Sequence[Outputs], Callable[[Array], Array]], Array]

GRADIENTS = ("dquery", "dkey", "dvalue", "dbias", "dsoftmax_aux")
NAMES = ("out", "lse", *GRADIENTS)

# Fields of a Semantics on which no law depends.
_FREE = frozenset({"gradients", "lse_gradient", "deterministic", "hidden_nonfinite", "row_max_gradient"})
# Choices that no law sees: it is judged neither on rows that see no key, nor with dropout.
_UNJUDGED = frozenset({"unspecified", "own_generator"})


@dataclass(frozen=True)
class Called:
    """One call: its arrays, and how it runs.

    tiling: None is that of the case. clean: the same call without the NaN that nothing may depend on, from
    which its bounds are predicted; None if it has none. before: runs before the call. run: makes the call in
    another way than `execute`.
    """

    built: Built
    tiling: int | None = None
    clean: Built | None = None
    before: Callable[[], None] = lambda: None
    run: Callable[[], Outputs] | None = None


@dataclass(frozen=True)
class Equation:
    """Two sides that are equal, each linear in the outputs of the calls.

    output: of the first call, which the left side shows. source: an output that the other calls must have.
    right_bound: from the outputs and from their bounds to the bound of the right side, if it is not linear.
    where: tells the equations of one output apart in a message.
    """

    output: str
    left: Side
    right: Side
    source: str | None = None
    right_bound: Callable[[Sequence[Outputs], Sequence[Outputs]], Array] | None = None
    where: str = ""


@dataclass(frozen=True)
class Rewrite:
    """The calls of a law, the first of which is that of the case, and the equations between their outputs."""

    calls: tuple[Called, ...]
    equations: tuple[Equation, ...]


@dataclass(frozen=True)
class Law:
    """One law: an entry of the table.

    name: it is the check `law.NAME`. clauses: those that it follows from.
    equal: the law in a sentence.
    rewrite: from a trial to the calls and equations, or the reason why the case does not show the law.
    features: those that some call has; the subject must declare all.
    off: features that are taken from the case first. case: makes a case to which the law applies.
    any_dialect: whether it holds for every Semantics, not only for those that agree with the standard one.
    applies: None, or another reason why the law does not apply to a subject.
    exact: whether the outputs are equal bit for bit, for subjects that declare to be deterministic.
    """

    name: str
    clauses: tuple[str, ...]
    equal: str
    rewrite: Callable[[Trial], Rewrite | str]
    features: frozenset[str] = frozenset()
    off: frozenset[str] = frozenset()
    case: Callable[[Case], Case] = lambda case: case
    any_dialect: bool = False
    applies: Callable[[Subject], str | None] = lambda _subject: None
    exact: bool = False

    def why_not(self, subject: Subject) -> str | None:
        """Return why the law does not apply to a subject, in one clause; None if it does."""
        missing = sorted(self.features - subject.features)
        if missing:
            return f"does not declare {', '.join(missing)}"
        if self.exact and not subject.semantics.deterministic:
            return "declares that it is not deterministic"
        differs = () if self.any_dialect else _dialect(subject.semantics)
        return f"declares a dialect: {', '.join(differs)}" if differs else self.applies(subject)

    def recipe(self, case: Case) -> Case:
        """Return the case to which the law applies. Raises ValueError if there is none."""
        case = replace(case, poison=False)
        off = self.off & case.features
        return self.case(without(case, off - {"gqa"}) if off else case)


def _dialect(semantics: Semantics) -> tuple[str, ...]:
    """Return the fields in which a Semantics differs from the standard one."""
    return tuple(
        name
        for name in Semantics.__dataclass_fields__
        if name not in _FREE
        and getattr(semantics, name) != getattr(STANDARD, name)
        and getattr(semantics, name) not in _UNJUDGED
    )


def output_of(name: str, call: int = 0) -> Side:
    """Return a side that is one output of one call."""
    return lambda calls, _size: calls[call][name]


def same(*names: str, calls: Iterable[int] = (1,)) -> tuple[Equation, ...]:
    """Return the equations of outputs, all without names, of the first call and each of some others."""
    return tuple(
        Equation(name, output_of(name), output_of(name, call)) for name in names or NAMES for call in calls
    )


def mapped(name: str, change: Callable[[Array], Array], source: str | None = None) -> Equation:
    """Return the equation of an output with a map of the second call's, a sum of its elements."""
    return Equation(name, output_of(name), lambda calls, _size: change(calls[1][source or name]), source)


def selected(name: str, choose: Callable[[Array], Array]) -> Equation:
    """Return the equation of some elements of an output of the first two calls."""
    return Equation(
        name,
        lambda calls, _size: choose(calls[0][name]),
        lambda calls, _size: choose(calls[1][name]),
    )


def total(*names: str) -> tuple[Equation, ...]:
    """Return the equations of outputs with the sums of those of all other calls."""
    return tuple(
        Equation(
            name,
            output_of(name),
            lambda calls, _size, name=name: np.sum([call[name] for call in calls[1:]], axis=0),
        )
        for name in names
    )


def changed(built: Built, **changes: Any) -> Built:
    """Return a call with other arguments; the mask is handed over as bool."""
    return Built(replace(built.problem, **changes), built.cotangents)


def with_cotangents(built: Built, out: Array, lse: Array) -> Built:
    """Return a call with other cotangents."""
    return replace(built, cotangents=replace(built.cotangents, out=out, lse=lse))
