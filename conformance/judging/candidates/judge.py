"""Tests of a tuner's candidate: the float64 oracle and the error model on inputs drawn anew.

A small call is compared with the oracle in full. A large call is compared with the oracle in a sample of rows
and keys, and in full with the XLA kernel in float32, which is first tested in the same sample.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.build import Built
from attest.conformance.drawing.production import SampledBlock, SampledProblem
from attest.conformance.judging.candidates.comparison import furthest_off, in_float32, same_bits
from attest.conformance.judging.candidates.inputs import Drawn, NotJudgedError, draw_inputs
from attest.conformance.subject import Subject
from attest.kernels.operations.judging import CandidateCall, Judgement
from attest.reference import judgements
from attest.reference.error_model import Prediction, predict
from attest.reference.numerics import Numerics, format_of
from attest.reference.oracle import Cotangents, attention
from attest.reference.semantics import STANDARD

Array = NDArray[Any]

# From the name of an implementation to the Subject that declares its arithmetic; None where there is none.
# The second argument says whether a Subject for other machines counts, too.
type DeclaredBy = Callable[[str, bool], Subject | None]

# Pairs of a query row and a key, of all heads, up to which the oracle judges the whole call.
_WHOLE_PAIRS = 1 << 20
# Of a larger call: the blocks, each one key head of a batch entry, and the rows and keys of each.
_BLOCKS, _ROWS, _KEYS = 3, 16, 64
# Rows beside multiples of these are where a block ends.
_BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
# Candidates take blocks of any size; those of few keys round their sums most often.
_FEWEST_KEYS = 16
# What is judged of many independent errors alone: a sample has few rows, whose errors have common causes.
_OF_MANY = ("rms_ratio", "bias_t")
_NUMBERS = ("worst_ratio", "rms_ratio", "largest_z")


@dataclass(frozen=True)
class _Truth:
    """The exact outputs, the errors that they allow, and how to take the same parts from whole outputs.

    place: where an element of a part lies in the whole output. whole: whether the parts are all of it.
    """

    wanted: Mapping[str, Array]
    predictions: Mapping[str, Prediction]
    part: Callable[[Mapping[str, Array]], dict[str, Array]]
    place: Callable[[str, tuple[int, ...]], tuple[int, ...]]
    whole: bool


def judge_candidate(call: CandidateCall, declared_by: DeclaredBy) -> Judgement:
    """Return whether a candidate is right on inputs that are drawn from its seed.

    Its results must be within the error model's limits and the same bits twice. Exceptions of the candidate
    are not caught.
    """
    subject = declared_by(call.implementation, False)
    if subject is None:
        reason = f"nobody declares the arithmetic of {call.implementation!r} here"
        return Judgement(False, reason, failed=True)
    try:
        drawn = draw_inputs(call.arguments, call.seed)
    except NotJudgedError as error:
        return Judgement(False, str(error), failed=True)
    dtype = drawn.problem.query.dtype.name
    numerics = replace(subject.numerics(dtype, subject.tilings[-1]), key_block=_FEWEST_KEYS)
    blocks = _sample(drawn, call.seed)
    d_out = _cotangent(drawn, blocks, call.seed)
    truth = _truth(drawn, d_out if call.backward else None, blocks, numerics)
    run = call.run(drawn.arguments, d_out) if call.backward else call.run(drawn.arguments)
    results = dict(run())
    changed = [name for name, same in same_bits(results, run()).items() if not same]
    if changed:
        return Judgement(False, f"{changed[0]} has other bits in a second call on the same inputs")
    judgement = _judged(truth, _fetched(results), drawn)
    if not judgement.right or truth.whole:
        return judgement
    reference = declared_by("xla", True)
    assert reference is not None
    exact = in_float32(reference.call, drawn, d_out if call.backward else None)
    return _compared(truth, drawn, exact, results, judgement)


def _judged(truth: _Truth, outputs: Mapping[str, Array], drawn: Drawn) -> Judgement:
    """Compare the outputs with the limits of the error model."""
    problem = drawn.problem
    statistics: dict[str, dict[str, float]] = {}
    reasons: list[str] = []
    parts = truth.part(outputs)
    for name in (name for name in outputs if name in parts and name in truth.wanted):
        got = parts[name]
        found = judgements.measure(got, truth.wanted[name], truth.predictions[name])
        limits = judgements.limits(name, found.elements, problem.kv_len, problem.query.dtype.name)
        statistics[name] = {number: float(getattr(found, number)) for number in _NUMBERS}
        broken = [x for x in judgements.exceeded(found, limits) if truth.whole or x not in _OF_MANY]
        if broken:
            at = found.worst_index
            reasons.append(
                f"{name} is further off than the error model allows ({', '.join(broken)}): at "
                f"{list(truth.place(name, at))} got {got[at]}, expected {truth.wanted[name][at]:.9g}, off by "
                f"{found.worst_ratio:.3g} times the bound"
            )
    return Judgement(not reasons, reasons[0] if reasons else "", statistics)


def _compared(
    truth: _Truth,
    drawn: Drawn,
    exact: Mapping[str, jax.Array],
    results: Mapping[str, jax.Array],
    judgement: Judgement,
) -> Judgement:
    """Compare all of the outputs with those of the XLA kernel in float32, which the sample must find right.

    No element may be further off than the largest bound of the sample and the rounding of both.
    """
    sound = truth.part(_fetched({name: x for name, x in exact.items() if name in truth.wanted}))
    statistics = {name: dict(of) for name, of in judgement.statistics.items()}
    for name, got in results.items():
        if name in truth.predictions:
            bound = truth.predictions[name].bound
            off = np.abs(sound[name] - truth.wanted[name]) / bound
            if not float(np.nanmax(np.where(bound > 0, off, 0.0))) <= 1:
                return Judgement(
                    False, f"the XLA kernel, which is compared with, is off in {name}", statistics
                )
            limit = float(np.max(bound[np.isfinite(bound)], initial=0.0))
        else:
            # A gradient that is summed over rows: its errors add like those of as many elements.
            limit = _summed_limit(truth, drawn)
        worst, at = furthest_off(got, exact[name], limit, format_of(got.dtype).unit)
        statistics.setdefault(name, {})["whole_ratio"] = worst
        if not worst <= 1:
            reason = (
                f"{name} is off at {list(at)}: got {got[at]}, the XLA kernel in float32 {exact[name][at]:.9g}"
            )
            return Judgement(False, reason, statistics)
    return replace(judgement, statistics=statistics)


def _fetched(results: Mapping[str, jax.Array]) -> dict[str, Array]:
    """Return results of a program, in NumPy."""
    return {name: np.asarray(x) for name, x in jax.device_get(dict(results)).items()}


def _summed_limit(truth: _Truth, drawn: Drawn) -> float:
    """Return the allowed error of dbias and dsoftmax_aux: dquery's bound for each row with cotangents."""
    bound = truth.predictions["dquery"].bound if "dquery" in truth.predictions else np.zeros(1)
    scale = drawn.problem.softmax_scale or drawn.problem.head_dim**-0.5
    return float(np.max(bound, initial=0.0)) / abs(scale or 1.0) * _BLOCKS * _ROWS


def _sample(drawn: Drawn, seed: int) -> tuple[SampledBlock, ...] | None:
    """Return the blocks of a large call that the oracle judges; None for all of a small one."""
    problem = drawn.problem
    if problem.batch * problem.q_heads * problem.q_len * problem.kv_len <= _WHOLE_PAIRS:
        return None
    stream = np.random.default_rng([seed, 1])
    places = stream.permutation(problem.batch * problem.kv_heads)[:_BLOCKS]
    return tuple(
        SampledBlock(
            int(place) // problem.kv_heads,
            int(place) % problem.kv_heads,
            _places(stream, problem.q_len, _ROWS),
            _places(stream, problem.kv_len, _KEYS),
        )
        for place in places
    )


def _places(stream: np.random.Generator, length: int, number: int) -> NDArray[np.int64]:
    """Return so many indices, or all: both ends, some beside the ends of blocks, and others at random."""
    sizes = stream.choice(_BLOCK_SIZES, number // 2)
    edges = sizes * stream.integers(0, -(-length // sizes) + 1) - stream.integers(0, 2, len(sizes))
    first = np.clip(np.concatenate([[0, length - 1], edges]), 0, length - 1)
    others = stream.choice(length, min(length, 2 * number), replace=False)
    found = dict.fromkeys(int(x) for x in (*first, *others))
    return np.sort(np.array(list(found)[:number], np.int64))


def _cotangent(drawn: Drawn, blocks: tuple[SampledBlock, ...] | None, seed: int) -> Array:
    """Return the cotangent of out: normal, and 0 outside of the rows that are judged."""
    problem = drawn.problem
    stream = np.random.default_rng([seed, 2])
    shape = (*problem.query.shape[:3], problem.value_dim)
    if blocks is None:
        return stream.standard_normal(shape, np.float32).astype(problem.query.dtype)
    d_out = np.zeros(shape, problem.query.dtype)
    for block in blocks:
        heads = slice(block.kv_head * problem.group, (block.kv_head + 1) * problem.group)
        size = (len(block.rows), problem.group, problem.value_dim)
        d_out[block.batch, block.rows, heads] = stream.standard_normal(size, np.float32).astype(d_out.dtype)
    return d_out


def _truth(
    drawn: Drawn, d_out: Array | None, blocks: tuple[SampledBlock, ...] | None, numerics: Numerics
) -> _Truth:
    """Return the oracle's answer and the error model's predictions, of all or of the blocks."""
    problem = drawn.problem
    silent = np.zeros((problem.batch, problem.q_heads, problem.q_len), np.float32)
    cotangents = None if d_out is None else Cotangents(d_out, silent)
    if blocks is None:
        answer = attention(problem, STANDARD, cotangents).items()
        predictions = predict(problem, STANDARD, numerics, cotangents, repeats=False)
        return _Truth(answer, predictions, dict, lambda _, index: index, whole=True)
    unread = Cotangents(np.zeros((*problem.query.shape[:3], problem.value_dim)), silent)
    sampled = SampledProblem(Built(problem, cotangents or unread), blocks)
    answer, predictions = sampled.truth(STANDARD, numerics, gradients=d_out is not None)
    judged = ("out",) if d_out is None else ("out", "dquery", "dkey", "dvalue")
    wanted = {name: x for name, x in answer.items().items() if name in judged}
    predicted = {name: predictions[name] for name in wanted}
    return _Truth(wanted, predicted, sampled.part, sampled.place, whole=False)
