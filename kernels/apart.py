"""Two implementations for one call: one computes the forward pass, another the backward pass.

A backward pass reads out, lse and the row maximum of the forward pass, which all implementations return
alike. What a forward pass keeps beside them for its own backward pass is left out.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from attest.kernels.arguments import Call
from attest.kernels.cotangents import RowTerms
from attest.kernels.implementation import Backward, Forward, Passes, Settings


class _Each(NamedTuple):
    """A setting as each of the two implementations reads it."""

    forward: Any
    backward: Any


@cache
def apart(forward: Passes, backward: Passes) -> Passes:
    """Return the passes of two implementations as those of one; equal arguments return the same ones."""

    def run_forward(settings: Settings, call: Call) -> Forward:
        own = replace(settings, precision=settings.precision.forward)
        return forward.forward(own, call)._replace(kept=None)

    def run_backward(settings: Settings, call: Call, terms: RowTerms, _kept: Any) -> Backward:
        own = replace(settings, precision=settings.precision.backward)
        return backward.backward(own, call, terms, None)

    return Passes(
        forward=run_forward,
        backward=run_backward,
        check_forward=forward.check_forward,
        check_backward=backward.check_backward,
        check_precision=_each(forward.check_precision, backward.check_precision),
        cleans_rows=backward.cleans_rows,
        partitioned=forward.partitioned and backward.partitioned,
    )


def _each(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[[Any], _Each]:
    return lambda precision: _Each(forward(precision), backward(precision))
