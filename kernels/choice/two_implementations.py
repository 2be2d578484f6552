"""Two implementations for one call: one where gradients are taken, another one where none are.

The fastest forward pass need not belong to the fastest pair of passes. A pair is of one implementation: its
passes share the copies that they make of the inputs, which two implementations would each make anew.
"""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from attest.kernels.call.call import Call
from attest.kernels.contract import Backward, Forward, Passes, Settings
from attest.kernels.numerics.row_terms import RowTerms


class _Each(NamedTuple):
    """A setting as each of the two implementations reads it."""

    alone: Any
    followed: Any


@cache
def apart(alone: Passes, followed: Passes) -> Passes:
    """Return passes whose forward pass is that of `alone` where no backward pass follows; else of `followed`.

    Block sizes are those of `followed`, so there must be none. Equal arguments return the same passes.
    """

    def forward(settings: Settings, call: Call) -> Forward:
        if settings.followed:
            return followed.forward(replace(settings, precision=settings.precision.followed), call)
        return alone.forward(replace(settings, precision=settings.precision.alone), call)

    def backward(settings: Settings, call: Call, terms: RowTerms, kept: Any) -> Backward:
        return followed.backward(replace(settings, precision=settings.precision.followed), call, terms, kept)

    def check_precision(precision: Any) -> _Each:
        return _Each(alone.check_precision(precision), followed.check_precision(precision))

    return Passes(
        forward=forward,
        backward=backward,
        check_forward=followed.check_forward,
        check_backward=followed.check_backward,
        check_precision=check_precision,
        cleans_rows=followed.cleans_rows,
        partitioned=alone.partitioned and followed.partitioned,
    )
