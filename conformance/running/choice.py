"""Draws: what a plan poses, as a recipe; the case itself is chosen where it is judged.

A filling has a few tries, and the first that is sensitive enough to show a defect is posed. To find it takes
the oracle, whose exact answers the process that judges the case uses once more.
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

# Logits of the largest case that is looked at before it is posed: larger ones are costly, and seldom blind.
_LOOKED_AT = 40_000


@dataclass(frozen=True)
class Filling:
    """A filling of a row of a covering array, by number, as `attest.conformance.drawing.recipes` draws it.

    poison: that case with whole keys hidden and poison there.
    """

    row: Facts
    offer: Offer
    seed: int
    number: int = 0
    poison: bool = False


@dataclass(frozen=True)
class IfTelling:
    """A listed case that is posed only if it is sensitive enough to show a defect."""

    case: Case


Draw = Case | Filling | IfTelling


def chosen(draw: Draw) -> Case | None:
    """Return the case that is posed; None if there is none."""
    if isinstance(draw, IfTelling):
        return draw.case if telling(draw.case) else None
    return draw if isinstance(draw, Case) else _drawn(draw, telling)


def first_try(draw: Draw) -> Case | None:
    """Return a case of the same shapes, options and features as the one that is posed; takes no oracle."""
    if isinstance(draw, IfTelling):
        return draw.case
    return draw if isinstance(draw, Case) else _drawn(draw, lambda _case: True)


def telling(case: Case) -> bool:
    """Return whether a case is sensitive enough to show a defect of a kernel of the usual arithmetic.

    The same for every subject, so that the cases are the same. For a subject that declares another arithmetic
    the case may be INCONCLUSIVE all the same.
    """
    if case.batch * case.q_heads * case.q_len * case.kv_len > _LOOKED_AT:
        return True
    return _tells(replace(case, tiling=0))


def _drawn(filling: Filling, tells: Any) -> Case | None:
    number, seed = filling.number, filling.seed
    case = fillings(filling.row, filling.offer, seed, number + 1, tells)[number]
    return poisoned(case, seed) if filling.poison else case


@lru_cache(maxsize=1 << 14)
def _tells(case: Case) -> bool:
    return not Trial(_USUAL, case).blind_spots


def _not_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("what is drawn calls no kernel")


_USUAL = Subject("usual", _not_called, frozenset(FEATURES), dtypes=DTYPES)
