"""Logits, weights and lse of one block of query rows, exactly as the clauses say.

The oracle sums these blocks into outputs and gradients, the error model into bounds. A block holds every
key, so memory is O(rows x Sk) whatever the length of the query.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attest.reference import double_double
from attest.reference.dropout import keep_mask
from attest.reference.problem import Problem
from attest.reference.semantics import Semantics
from attest.reference.visibility import Bools, Ints, allowed, distances, padding_rows, pick

Floats = NDArray[np.float64]

# What is this close to the row maximum is equal to it: under a cap, logits approach each other further than
# pairs of float64 resolve.
_TIE = 1e-20

# Elements of one [rows, Sk] array; about a dozen of them live at a time.
_BLOCK_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class RowBlock:
    """Some query rows of one head against all keys, in float64; R rows, N keys, n sinks.

    query [R, D], key [N, D], value [N, Dv]: as stored, hidden NaN and inf included.
    seen: bool [R, N], keys that the row sees. weighed: keys with a weight; more than `seen` only in
    dialects where hidden keys keep one.
    dot_scale: the factor of q.k.
    uncapped: [R, N] the logits that the cap acts on. tanh, cap_slope: [R, N] tanh(uncapped / cap) and
        1 - tanh^2, None without a cap.
    logits: [R, N] what the softmax sees, -inf where not weighed. row_max: [R] the largest of logits and
        sinks. normaliser: [R] the sum of exp(logit - row_max). lse: [R] natural logarithm.
    weights: [R, N] softmax, undropped. keep: [R, N] dropout's factor 0 or 1 / (1 - r), or None.
    sink_logits: [n], sink_weights: [R, n], sink_slope [n]: d sink logit / d softmax_aux.
    max_share: [R, N] what a change of each logit moves the row maximum by, and sink_max_share: [R, n] the
        same of the sinks; None where the maximum is held constant.
    padding: bool [R], rows past a length. bias: [R, N] or None. bias_place: where it joins (S2).
    distance: [R, N] positions between row and key, None without ALiBi; slope: what a logit loses for each,
        where the bias joins (S25).
    """

    batch: int
    head: int
    kv_head: int
    rows: Ints
    query: Floats
    key: Floats
    value: Floats
    seen: Bools
    weighed: Bools
    dot_scale: float
    uncapped: Floats
    tanh: Floats | None
    cap_slope: Floats | None
    logits: Floats
    row_max: Floats
    normaliser: Floats
    lse: Floats
    weights: Floats
    keep: Floats | None
    sink_logits: Floats
    sink_slope: Floats
    sink_weights: Floats
    max_share: Floats | None
    sink_max_share: Floats | None
    padding: Bools
    bias: Floats | None
    bias_place: str
    distance: Floats | None
    slope: float

    def dropped_weights(self) -> Floats:
        """Return the weights that multiply the values: dropout applied."""
        return self.weights if self.keep is None else self.weights * self.keep


def row_blocks(
    problem: Problem, semantics: Semantics, rows: Ints | None = None, heads: Ints | None = None
) -> Iterator[RowBlock]:
    """Yield every block of `rows` (all by default), batch by batch, head by head."""
    chosen = np.arange(problem.q_len, dtype=np.int64) if rows is None else rows
    step = max(1, _BLOCK_ELEMENTS // max(problem.kv_len, 1))
    for batch in range(problem.batch):
        padding = padding_rows(problem, semantics, batch)
        for kv_head in range(problem.kv_heads):
            key = problem.key[batch, :, kv_head].astype(np.float64)
            value = problem.value[batch, :, kv_head].astype(np.float64)
            for head in range(kv_head * problem.group, (kv_head + 1) * problem.group):
                if heads is not None and head not in heads:
                    continue
                for start in range(0, len(chosen), step):
                    block_rows = chosen[start : start + step]
                    with np.errstate(all="ignore"):
                        yield _row_block(
                            problem, semantics, batch, head, block_rows, key, value, padding[block_rows]
                        )


def contract(weights: Floats, present: Bools, values: Floats) -> Floats:
    """Compute weights @ values over the present pairs only: [R, N], [R, N], [N, D] to [R, D].

    Where a pair is absent its value counts for nothing, NaN and inf included (S4); weights of absent
    pairs must be 0.
    """
    strange = ~np.isfinite(values).all(axis=1)
    if not strange.any():
        return weights @ values
    total = np.where(present, weights, 0.0)[:, ~strange] @ values[~strange]
    for column in np.flatnonzero(strange):
        there = present[:, column]
        total[there] += weights[there, column, None] * values[column]
    return total


def _row_block(
    problem: Problem,
    semantics: Semantics,
    batch: int,
    head: int,
    rows: Ints,
    key: Floats,
    value: Floats,
    padding: Bools,
) -> RowBlock:
    query = problem.query[batch, rows, head].astype(np.float64)
    permitted = allowed(problem, semantics, batch, head, rows)
    bias = None
    if problem.bias is not None:
        added = pick(problem.bias, batch, head, rows).astype(np.float64)
        bias = np.broadcast_to(added, permitted.shape)
    seen = permitted if bias is None else permitted & ~np.isneginf(bias)
    weighed = seen | ~permitted if semantics.hidden == "sentinel" else seen

    distance, slope = None, 0.0
    if problem.alibi_slopes is not None:
        distance = distances(problem, semantics, batch, rows).astype(np.float64)
        slope = float(problem.alibi_slopes[batch if len(problem.alibi_slopes) > 1 else 0, head])

    def with_bias(pair: double_double.Pair) -> double_double.Pair:
        """Return the logits with bias and ALiBi."""
        if bias is not None:
            pair = double_double.plus(pair, bias)
        if distance is not None:
            high, low = double_double.times((distance, np.zeros_like(distance)), (-slope, 0.0))
            pair = double_double.plus(double_double.plus(pair, high), low)
        return pair

    scale = _scale(problem, semantics)
    pair = _uncapped(semantics, double_double.dot(query, key), with_bias, scale)
    uncapped, tanh, cap_slope = pair[0] + pair[1], None, None
    if problem.logits_soft_cap is not None:
        tanh = np.tanh(uncapped / problem.logits_soft_cap)
        cap_slope = np.cosh(uncapped / problem.logits_soft_cap) ** -2.0
        pair = double_double.soft_cap(pair, problem.logits_soft_cap)
    if semantics.bias == "after_cap":
        pair = with_bias(pair)
    if semantics.hidden == "sentinel":
        pair = (np.where(permitted, pair[0], semantics.sentinel), np.where(permitted, pair[1], 0.0))
    high, low = double_double.normalised(pair)
    logits = (np.where(weighed, high, -np.inf), np.where(weighed, low, 0.0))

    sinks, sink_slope = _sinks(problem, semantics, head)
    weights, sink_weights, row_max, normaliser = _softmax(logits, sinks)
    max_share, sink_max_share = None, None
    if not problem.normalize_output and semantics.row_max_gradient == "differentiated":
        max_share, sink_max_share = _max_shares(logits, sinks)
    lse = row_max + np.log(normaliser)
    empty = np.isneginf(row_max) & ~padding
    if semantics.empty_rows == "nan":
        weights[empty], lse[empty], normaliser[empty] = np.nan, np.nan, np.nan
        seen, weighed = seen | empty[:, None], weighed | empty[:, None]
    if semantics.empty_rows == "mean_of_values":
        weights[empty], normaliser[empty] = 1.0 / max(problem.kv_len, 1), 1.0
        weighed = weighed | empty[:, None]
    weights[padding], sink_weights[padding] = 0.0, 0.0
    weighed = weighed & ~padding[:, None]
    if semantics.hidden == "absent":
        lse[padding] = -np.inf
    return RowBlock(
        batch=batch,
        head=head,
        kv_head=head // problem.group,
        rows=rows,
        query=query,
        key=key,
        value=value,
        seen=seen,
        weighed=weighed,
        dot_scale=scale[0],
        uncapped=uncapped,
        tanh=tanh,
        cap_slope=cap_slope,
        logits=logits[0],
        row_max=row_max,
        normaliser=normaliser,
        lse=lse,
        weights=weights,
        keep=_dropout(problem, semantics, batch, head, rows),
        sink_logits=sinks[0],
        sink_slope=sink_slope,
        sink_weights=sink_weights,
        max_share=max_share,
        sink_max_share=sink_max_share,
        padding=padding,
        bias=bias,
        bias_place=semantics.bias,
        distance=distance,
        slope=slope,
    )


def dot_scale(problem: Problem, semantics: Semantics) -> float:
    """Return the factor of q.k (S1)."""
    return _scale(problem, semantics)[0]


def _scale(problem: Problem, semantics: Semantics) -> tuple[float, float]:
    if problem.softmax_scale is not None:
        return float(problem.softmax_scale), 0.0
    if semantics.default_scale == "one":
        return 1.0, 0.0
    return double_double.inverse_sqrt(problem.head_dim)


def _uncapped(
    semantics: Semantics,
    dot: double_double.Pair,
    with_bias: Callable[[double_double.Pair], double_double.Pair],
    scale: tuple[float, float],
) -> double_double.Pair:
    """Return the logits before the cap, with bias and ALiBi wherever S2 or its dialect adds them there."""
    if semantics.bias == "after_cap":
        return double_double.times(dot, scale)
    if semantics.bias == "before_scale":
        return double_double.times(with_bias(dot), scale)
    return with_bias(double_double.times(dot, scale))


def _sinks(problem: Problem, semantics: Semantics, head: int) -> tuple[double_double.Pair, Floats]:
    """Return the sink logits of a head, a pair [n], and their derivatives by softmax_aux, [n] (S11)."""
    sinks = problem.sinks()
    if sinks is None:
        return (np.empty(0), np.empty(0)), np.empty(0)
    given = (sinks[head].copy(), np.zeros(sinks.shape[1]))
    cap = problem.logits_soft_cap
    if semantics.sinks == "as_given" or cap is None:
        return given, np.ones(sinks.shape[1])
    return double_double.soft_cap(given, cap), np.cosh(sinks[head] / cap) ** -2.0


def _softmax(logits: double_double.Pair, sinks: double_double.Pair) -> tuple[Floats, Floats, Floats, Floats]:
    """Return weights [R, N], sink weights [R, n], row maximum, normaliser [R]; empty rows: 0 and -inf."""
    row_max, max_low = _largest(logits, sinks)
    empty = np.isneginf(row_max)
    shift = np.where(empty, 0.0, row_max), np.where(empty, 0.0, max_low)
    exponentials = double_double.exp_difference(logits, shift)
    sink_exponentials = double_double.exp_difference((sinks[0][None, :], sinks[1][None, :]), shift)
    normaliser = exponentials.sum(axis=1) + sink_exponentials.sum(axis=1)
    divisor = np.where(empty, 1.0, normaliser)[:, None]
    return exponentials / divisor, sink_exponentials / divisor, row_max, normaliser


def _largest(logits: double_double.Pair, sinks: double_double.Pair) -> double_double.Pair:
    """Return the largest of the logits and sinks of each row, a pair [R]; -inf in both for an empty row."""
    (high, low), (sink_high, sink_low) = logits, sinks
    row_max = np.maximum(high.max(axis=1, initial=-np.inf), sink_high.max(initial=-np.inf))
    # The largest pair is, among those with the largest high part, the one with the largest low part.
    lows = np.where(high == row_max[:, None], low, -np.inf).max(axis=1, initial=-np.inf)
    sink_lows = np.where(sink_high == row_max[:, None], sink_low, -np.inf).max(axis=1, initial=-np.inf)
    return row_max, np.maximum(lows, sink_lows)


def _max_shares(logits: double_double.Pair, sinks: double_double.Pair) -> tuple[Floats, Floats]:
    """Return the derivatives of row maxima by the logits [R, N] and sinks [R, n]: equal where they tie."""
    high, low = (part[:, None] for part in _largest(logits, sinks))
    least = -_TIE * np.maximum(np.abs(high), 1.0)
    attained, by_sinks = (
        ((terms[0] - high) + (terms[1] - low) >= least) & ~np.isneginf(high) for terms in (logits, sinks)
    )
    count = np.maximum(attained.sum(axis=1) + by_sinks.sum(axis=1), 1)[:, None]
    return attained / count, by_sinks / count


def _dropout(problem: Problem, semantics: Semantics, batch: int, head: int, rows: Ints) -> Floats | None:
    """Return the factor of each weight under dropout: 0 or 1 / (1 - r) (S12, S29)."""
    if problem.dropout_prob == 0 or problem.dropout_seed is None:
        return None
    shape = (problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
    seed, rate = problem.dropout_seed, problem.dropout_prob
    shared = problem.dropout_shared
    if problem.dropout_keep is not None:
        kept = problem.dropout_keep[batch, head, rows]
    else:
        kept = keep_mask(semantics, seed, rate, batch, head, rows, shape, problem.origin, shared)
    return kept / (1.0 - rate)
