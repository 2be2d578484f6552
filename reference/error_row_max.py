"""The predicted error of the gradient that goes through the row maximum (S26).

An output that is not normalised is scaled by exp(-m), with m the row maximum. A kernel that differentiates m
subtracts D, the sum of P dP, from the gradient of whatever attains the maximum. It errs by the error of D.
Where rounding decides which of several logits is the largest, all of D may go to another.
"""

from dataclasses import dataclass

import numpy as np

from attest.reference.error_forward import ForwardError
from attest.reference.numerics import Floats, Numerics
from attest.reference.oracle import BackwardBlock
from attest.reference.rows import RowBlock
from attest.reference.spread import Spread, finite


@dataclass(frozen=True)
class RowMaxError:
    """The errors of what the row maximum adds to the gradients of the logits and of the sinks.

    keys: [R, N] before the cap's derivative is applied. sinks: [R, n] the same.
    """

    keys: Spread
    sinks: Spread


def row_max_error(
    numerics: Numerics,
    block: RowBlock,
    backward: BackwardBlock,
    error: ForwardError,
    weight: Floats,
    d_weights: Spread,
) -> RowMaxError:
    """Return the errors of a block; 0 where the maximum is held constant.

    weight [R, N]: the bound of the error of P. d_weights [R, N]: the error of dP.
    """
    if block.max_share is None or block.sink_max_share is None:
        return RowMaxError(_nothing(block.weights), _nothing(block.sink_weights))
    total = _row_dot_error(numerics, block, backward, error, weight, d_weights)
    row_dot = np.abs(finite(backward.row_dot))
    keys_tie, sinks_tie = _may_tie(block, error)

    def spread(share: Floats, tie: Floats) -> Spread:
        moved = tie * row_dot[:, None]
        share = np.maximum(share, tie)
        rounded = 6 * numerics.accumulator * row_dot[:, None] * share
        return Spread(
            share * total.bound[:, None] + moved + rounded, share**2 * total.variance[:, None] + moved**2
        )

    keys = spread(np.where(block.seen, block.max_share, 0.0), np.where(block.seen, keys_tie, 0.0))
    return RowMaxError(keys, spread(block.sink_max_share, sinks_tie))


def _nothing(like: Floats) -> Spread:
    return Spread(np.zeros_like(like), np.zeros_like(like))


def _row_dot_error(
    numerics: Numerics,
    block: RowBlock,
    backward: BackwardBlock,
    error: ForwardError,
    weight: Floats,
    d_weights: Spread,
) -> Spread:
    """Return the error [R] of D, whether it is summed as P dP over the keys or as dO O over the channels."""
    p, size = finite(block.weights), np.abs(finite(backward.d_weights))
    d_out, out = np.abs(finite(backward.d_out)), np.abs(finite(backward.out))
    row_dot = finite(backward.row_dot)
    u, depth = numerics.accumulator, d_out.shape[1]
    factor_off = np.expm1(np.minimum(error.factor.bound, 80.0))
    bound = (
        (weight * (size + d_weights.bound) + p * d_weights.bound).sum(axis=1)
        + (numerics.gamma(error.count) + 4 * u) * (p * size).sum(axis=1)
        + (error.cast.bound * size).sum(axis=1)
        + (numerics.gamma(depth) + 4 * u) * (d_out * out).sum(axis=1)
        + (d_out * error.out.bound).sum(axis=1)
    ) * (1 + factor_off)
    variance = (
        (p**2 * (error.weight.variance * size**2 + d_weights.variance)).sum(axis=1)
        + (error.cast.variance * size**2).sum(axis=1)
        + numerics.blocked_dot_variance(error.count, row_dot, (p**2 * size**2).sum(axis=1))
        + error.factor.variance * row_dot**2
    )
    return Spread(bound, variance)


def _may_tie(block: RowBlock, error: ForwardError) -> tuple[Floats, Floats]:
    """Return 1 for keys [R, N] and sinks [R, n] of which rounding decides if they are the largest, or 0."""
    logits, sinks = block.logits, np.broadcast_to(block.sink_logits, block.sink_weights.shape)
    reach, sink_reach = error.weight.bound, error.sinks.bound
    least = np.maximum(
        (logits - reach).max(axis=1, initial=-np.inf), (sinks - sink_reach).max(axis=1, initial=-np.inf)
    )[:, None]
    keys, by_sinks = logits + reach >= least, sinks + sink_reach >= least
    several = (keys.sum(axis=1) + by_sinks.sum(axis=1) > 1)[:, None]
    return (keys & several).astype(np.float64), (by_sinks & several).astype(np.float64)
