"""The error model: a bound and a standard deviation for every element of every output.

docs/explanation/error-model.md derives every line. `bound` is a theorem about any kernel that keeps to the
arithmetic it declares; `std` predicts the size of its error when roundings are independent, and is what
sees a precision that was quietly lowered.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attest.reference.coherence import NO_PARTS, Cast, Parts, Shares, common_variance, largest_share
from attest.reference.error_backward import d_logits_divisors, logits_gradient_error, query_error
from attest.reference.error_forward import forward_error, output_error
from attest.reference.error_keys import ByKeys
from attest.reference.numerics import Floats, Numerics
from attest.reference.oracle import (
    Cotangents,
    Sample,
    backward_block,
    effective,
    live_rows,
    natural_cotangents,
)
from attest.reference.problem import Problem
from attest.reference.rows import row_blocks
from attest.reference.semantics import Semantics
from attest.reference.spread import Spread, finite
from attest.reference.visibility import Ints


@dataclass(frozen=True)
class Prediction:
    """The prediction of one output, in its shape: float64, never NaN for a finite output.

    bound: no correct kernel errs by more; 0 where only the exact value will do.
    std: the standard deviation of the error of a correct kernel.
    worst_std: the same where few different values meet the largest error that rounding can make.
    repeated: the root of the sum of squares of the parts of the summed variance, each with errors that may
        be one and the same rounding: the whole sum if all are, little if none are.
    parts: of the summed variance, each of errors that are independent of all others.
    common: the standard deviation of the sum of all errors, each with the sign of the exact value and
        divided by its std, as far as one rounding is repeated from row to row; 0 where none is.
    """

    bound: NDArray[np.float64]
    std: NDArray[np.float64]
    worst_std: NDArray[np.float64]
    repeated: float = 0.0
    parts: Parts = NO_PARTS
    common: float = 0.0


def predict(
    problem: Problem,
    semantics: Semantics,
    numerics: Numerics,
    cotangents: Cotangents | None = None,
    sample: Sample | None = None,
    repeats: bool = True,
) -> dict[str, Prediction]:
    """Predict the errors of everything that `attest.reference.oracle.attention` answers, by the same names.

    repeats: whether values of a cast that are nearly equal share their rounding. It takes some fifteen times
        the oracle's time. Without it no std is larger: what is judged right without it is right with it.
    """
    problem = effective(problem, semantics)
    rows = np.arange(problem.q_len, dtype=np.int64) if sample is None else sample.query_rows
    with np.errstate(all="ignore"):
        if cotangents is None:
            return _by_queries(problem, semantics, numerics, None, rows, None, repeats)
        columns = np.arange(problem.kv_len, dtype=np.int64) if sample is None else sample.key_rows
        by_keys = ByKeys(problem, semantics, numerics, columns, sampled=sample is not None)
        natural = natural_cotangents(cotangents, semantics)
        live = rows if sample is None else live_rows(cotangents)
        # Most samples ask for the very rows whose cotangents are not zero: one pass does both.
        together = np.array_equal(live, np.sort(rows))
        predictions = _by_queries(
            problem, semantics, numerics, natural, rows, by_keys if together else None, repeats
        )
        if not together:
            divisors = d_logits_divisors(problem, numerics, natural)
            for block in row_blocks(problem, semantics, live):
                error = forward_error(problem, semantics, numerics, block, repeats)
                backward = backward_block(problem, natural, block)
                gradient = logits_gradient_error(problem, numerics, divisors, block, backward, error)
                by_keys.add(block, backward, error, gradient)
        spreads = by_keys.finish()
    return predictions | {name: _prediction(spread) for name, spread in spreads.items()}


def _by_queries(
    problem: Problem,
    semantics: Semantics,
    numerics: Numerics,
    cotangents: Cotangents | None,
    rows: Ints,
    by_keys: ByKeys | None,
    repeats: bool,
) -> dict[str, Prediction]:
    """Return out, lse and dquery of some rows for `natural_cotangents`; feeds the blocks to `by_keys`."""
    out_shape = (problem.batch, len(rows), problem.q_heads, problem.value_dim)
    extra = {"out": np.zeros(out_shape)}
    out = Spread(np.zeros(out_shape), np.zeros(out_shape), extra["out"])
    lse_shape = (problem.batch, problem.q_heads, len(rows))
    lse = Spread(np.zeros(lse_shape), np.zeros(lse_shape))
    query_shape = (*out_shape[:3], problem.head_dim)
    extra["dquery"] = np.zeros(query_shape)
    d_query = Spread(np.zeros(query_shape), np.zeros(query_shape), extra["dquery"])
    shares: dict[str, list[Shares]] = {"out": [], "dquery": []}
    parts = {"out": NO_PARTS, "dquery": NO_PARTS}
    repeated: dict[str, tuple[list[Cast], list[Floats]]] = {"out": ([], []), "dquery": ([], [])}

    def repeat(
        output: str, cast: Cast, want: Floats, spread: Spread, values: Floats, factor: Floats | float
    ) -> None:
        """Note a cast [R, N], of which an output is the sum with values [N, D], times a factor."""
        if cast.repeats:
            std = np.sqrt(np.where(spread.variance > 0, spread.variance, np.inf))
            signs = np.sign(want) / std
            repeated[output][0].append(cast)
            repeated[output][1].append((factor * signs) @ values.T)

    done = 0
    divisors = np.ones(0) if cotangents is None else d_logits_divisors(problem, numerics, cotangents)
    for block in row_blocks(problem, semantics, rows):
        here = slice(done, done + len(block.rows))
        done = here.stop % max(len(rows), 1)
        error = forward_error(problem, semantics, numerics, block, repeats)
        at = (block.batch, here, block.head)
        output = output_error(problem, numerics, block, error)
        out.bound[at], out.variance[at], extra["out"][at] = output.bound, output.variance, output.extra
        shares["out"].append(error.shares)
        parts["out"] = parts["out"].joined(output.parts)
        values = (finite(block.weights) * error.keep) @ error.value
        factor = 1.0 if problem.normalize_output else finite(block.normaliser)[:, None]
        repeat("out", error.rounded, values, output, error.value, factor)
        at_lse = (block.batch, block.head, here)
        lse.bound[at_lse], lse.variance[at_lse] = error.lse.bound, error.lse.variance
        if cotangents is not None:
            backward = backward_block(problem, cotangents, block)
            gradient = logits_gradient_error(problem, numerics, divisors, block, backward, error)
            query = query_error(numerics, block, backward, error, gradient)
            d_query.bound[at], d_query.variance[at] = query.bound, query.variance
            extra["dquery"][at] = query.extra
            shares["dquery"] += query.shares
            parts["dquery"] = parts["dquery"].joined(query.parts)
            d_logits = finite(backward.d_uncapped)
            total = d_logits @ error.key
            repeat("dquery", gradient.rounded, total, query, error.key, abs(block.dot_scale))
            if by_keys is not None:
                by_keys.add(block, backward, error, gradient)
    spreads = {"out": out, "lse": lse}
    if cotangents is not None and "query" in semantics.gradients:
        spreads["dquery"] = d_query
    common = {name: math.sqrt(common_variance(*noted)) for name, noted in repeated.items()}
    return {
        name: _prediction(
            replace(
                spread,
                common=common.get(name, 0.0),
                shares=tuple(shares.get(name, ())),
                parts=parts.get(name, NO_PARTS),
            )
        )
        for name, spread in spreads.items()
    }


def _prediction(spread: Spread) -> Prediction:
    return Prediction(
        bound=spread.bound,
        std=np.sqrt(spread.variance),
        worst_std=np.sqrt(spread.variance + spread.extra),
        repeated=largest_share(spread.shares),
        parts=spread.parts,
        common=spread.common,
    )
