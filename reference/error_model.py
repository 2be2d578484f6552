"""How far from the truth a correct kernel may be: a bound and a standard deviation for every element.

docs/error-model.md derives every line. `bound` is a theorem about any kernel that keeps to the arithmetic
it declares; `std` predicts the size of its error when roundings are independent, and is what sees a
precision that was quietly lowered.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.error_backward import ByKeys, logits_gradient_error, query_error
from reference.error_forward import Spread, forward_error, output_error
from reference.numerics import Numerics
from reference.oracle import Cotangents, Sample, backward_block, effective
from reference.problem import Problem
from reference.rows import row_blocks
from reference.semantics import Semantics
from reference.visibility import Ints


@dataclass(frozen=True)
class Prediction:
    """What is predicted of one output, in its shape: float64, never NaN for a finite output.

    bound: no correct kernel errs by more; 0 where only the exact value will do.
    std: the standard deviation of the error of a correct kernel.
    """

    bound: NDArray[np.float64]
    std: NDArray[np.float64]


def predict(
    problem: Problem,
    semantics: Semantics,
    numerics: Numerics,
    cotangents: Cotangents | None = None,
    sample: Sample | None = None,
) -> dict[str, Prediction]:
    """Predict the errors of everything that `reference.oracle.attention` answers, by the same names."""
    problem = effective(problem, semantics)
    rows = np.arange(problem.q_len, dtype=np.int64) if sample is None else sample.query_rows
    with np.errstate(all="ignore"):
        if cotangents is None:
            return _by_queries(problem, semantics, numerics, None, rows, None)
        columns = np.arange(problem.kv_len, dtype=np.int64) if sample is None else sample.key_rows
        by_keys = ByKeys(problem, semantics, numerics, columns, sampled=sample is not None)
        live = rows if sample is None else _live_rows(cotangents)
        # Most samples ask for the very rows whose cotangents are not zero: one pass does both.
        together = np.array_equal(live, np.sort(rows))
        predictions = _by_queries(
            problem, semantics, numerics, cotangents, rows, by_keys if together else None
        )
        if not together:
            for block in row_blocks(problem, semantics, live):
                error = forward_error(problem, semantics, numerics, block)
                backward = backward_block(problem, semantics, cotangents, block)
                gradient = logits_gradient_error(problem, numerics, block, backward, error)
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
) -> dict[str, Prediction]:
    """out, lse and dquery of the chosen rows; feeds the blocks to `by_keys` on the way."""
    out_shape = (problem.batch, len(rows), problem.q_heads, problem.value_dim)
    out = Spread(np.zeros(out_shape), np.zeros(out_shape))
    lse_shape = (problem.batch, problem.q_heads, len(rows))
    lse = Spread(np.zeros(lse_shape), np.zeros(lse_shape))
    query_shape = (*out_shape[:3], problem.head_dim)
    d_query = Spread(np.zeros(query_shape), np.zeros(query_shape))
    done = 0
    for block in row_blocks(problem, semantics, rows):
        here = slice(done, done + len(block.rows))
        done = here.stop % max(len(rows), 1)
        error = forward_error(problem, semantics, numerics, block)
        at = (block.batch, here, block.head)
        output = output_error(problem, numerics, block, error)
        out.bound[at], out.variance[at] = output.bound, output.variance
        at_lse = (block.batch, block.head, here)
        lse.bound[at_lse], lse.variance[at_lse] = error.lse.bound, error.lse.variance
        if cotangents is not None:
            backward = backward_block(problem, semantics, cotangents, block)
            gradient = logits_gradient_error(problem, numerics, block, backward, error)
            query = query_error(numerics, block, backward, error, gradient)
            d_query.bound[at], d_query.variance[at] = query.bound, query.variance
            if by_keys is not None:
                by_keys.add(block, backward, error, gradient)
    spreads = {"out": out, "lse": lse}
    if cotangents is not None and "query" in semantics.gradients:
        spreads["dquery"] = d_query
    return {name: _prediction(spread) for name, spread in spreads.items()}


def _live_rows(cotangents: Cotangents) -> Ints:
    """Query rows with a cotangent that is not zero, in any batch row or head; the others add nothing."""
    live = (cotangents.out != 0).any(axis=(0, 2, 3))
    if cotangents.lse is not None:
        live |= (cotangents.lse != 0).any(axis=(0, 1))
    return np.flatnonzero(live)


def _prediction(spread: Spread) -> Prediction:
    return Prediction(spread.bound, np.sqrt(spread.variance))
