"""Draws: recipes of the cases of a plan; the process that judges a case chooses it.

A filling has a few tries. The first one that is sensitive enough to show a defect is used. The choice needs
the oracle's exact answers, and the same process uses them again to judge the case.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.cases.features import DTYPES, FEATURES
from attest.conformance.drawing.covering import Facts
from attest.conformance.drawing.poison import poisoned
from attest.conformance.drawing.recipes import Offer, fillings
from attest.conformance.judging.trial import Trial
from attest.conformance.subject import Subject

# Cases with more logits are used without a test of their sensitivity: it is costly, and they rarely lack it.
_LOOKED_AT = 40_000


@dataclass(frozen=True)
class Filling:
    """A filling of a row of a covering array, by number, as `attest.conformance.drawing.recipes` draws it.

    poison: the same case with whole keys hidden and poison stored there.
    """

    row: Facts
    offer: Offer
    seed: int
    number: int = 0
    poison: bool = False


@dataclass(frozen=True)
class IfSensitive:
    """A listed case that is used only if it is sensitive enough to show a defect."""

    case: Case


Draw = Case | Filling | IfSensitive


def chosen(draw: Draw) -> Case | None:
    """Return the case of a draw; None if there is none."""
    if isinstance(draw, IfSensitive):
        return draw.case if is_sensitive(draw.case) else None
    return draw if isinstance(draw, Case) else _drawn(draw, is_sensitive)


def first_try(draw: Draw) -> Case | None:
    """Return a case of the same shapes, options and features as `chosen` does, without the oracle."""
    if isinstance(draw, IfSensitive):
        return draw.case
    return draw if isinstance(draw, Case) else _drawn(draw, lambda _case: True)


def is_sensitive(case: Case) -> bool:
    """Return whether a case is sensitive enough to show a defect of a kernel with default arithmetic.

    The answer is the same for every subject, so that all get the same cases. For a subject that declares
    another arithmetic, the case may still be INCONCLUSIVE.
    """
    if case.batch * case.q_heads * case.q_len * case.kv_len > _LOOKED_AT:
        return True
    return _shows_defects(replace(case, tiling=0))


def _drawn(filling: Filling, accept: Any) -> Case | None:
    number, seed = filling.number, filling.seed
    case = fillings(filling.row, filling.offer, seed, number + 1, accept)[number]
    return poisoned(case, seed) if filling.poison else case


@lru_cache(maxsize=1 << 14)
def _shows_defects(case: Case) -> bool:
    return not Trial(_USUAL, case).blind_spots


def _not_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("drawing a case must not call a kernel")


_USUAL = Subject("usual", _not_called, frozenset(FEATURES), dtypes=DTYPES)
