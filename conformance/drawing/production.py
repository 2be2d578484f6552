"""Problems of production size, and the sample of rows and keys that is judged.

The whole answer to such a problem would take hours. A sample of it is as exact: the cotangents are 0 but in
the sampled query rows, so that those rows alone decide dkey and dvalue of every key.
"""

import os
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from attest.conformance.cases.build import DTYPES, Built
from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.cases.families import Stream
from attest.conformance.cases.large_inputs import build_bulk
from attest.reference.error_model import Prediction, predict
from attest.reference.numerics import Numerics
from attest.reference.oracle import Answer, Cotangents, Sample, attention
from attest.reference.problem import Problem
from attest.reference.semantics import Semantics
from attest.reference.visibility import Ints, allowed

Array = NDArray[Any]

_FILE = Path(__file__).with_name("production.toml")

# Far from the numbers of the streams of cases/build.py and cases/large_inputs.py.
_FIRST_STREAM = 2000
_ROW_OUTPUTS = ("out", "dquery")
_KEY_OUTPUTS = ("dkey", "dvalue")


@dataclass(frozen=True)
class SampledBlock:
    """Some query rows and keys of one key head of one batch row; all query heads that read it."""

    batch: int
    kv_head: int
    rows: Ints
    keys: Ints


@dataclass(frozen=True)
class SampledProblem:
    """A problem of production size, with cotangents in the blocks alone."""

    built: Built
    blocks: tuple[SampledBlock, ...]

    def part(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the blocks hold of each output, the blocks along the first axis."""
        parts: dict[str, list[Array]] = {}
        for block in self.blocks:
            heads = _heads(self.built.problem, block)
            for name, array in outputs.items():
                if name in _ROW_OUTPUTS:
                    found = array[block.batch, block.rows, heads]
                elif name in _KEY_OUTPUTS:
                    found = array[block.batch, block.keys, block.kv_head : block.kv_head + 1]
                elif name == "lse":
                    found = array[block.batch][heads, block.rows]
                else:
                    continue
                parts.setdefault(name, []).append(found)
        return {name: np.stack(arrays) for name, arrays in parts.items()}

    def place(self, output: str, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return where an element of a part lies in the whole output."""
        block = self.blocks[index[0]]
        first = _heads(self.built.problem, block).start
        if output == "lse":
            return (block.batch, first + index[1], int(block.rows[index[2]]))
        if output in _ROW_OUTPUTS:
            return (block.batch, int(block.rows[index[1]]), first + index[2], index[3])
        return (block.batch, int(block.keys[index[1]]), block.kv_head, index[3])

    def truth(
        self, semantics: Semantics, numerics: Numerics, gradients: bool = True
    ) -> tuple[Answer, dict[str, Prediction]]:
        """Return the exact answer in the blocks, gradients or not, and how far off a kernel may be."""

        def of_block(block: SampledBlock) -> tuple[Answer, dict[str, Prediction]]:
            return _truth(self.built, block, semantics, numerics, gradients)

        # One thread of BLAS to each block: its own threads would be far more than a container's processors.
        with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(os.cpu_count()) as threads:
            found = list(threads.map(of_block, self.blocks))
        answers = [answer.items() for answer, _ in found]
        answer = Answer(**{name: np.concatenate([a[name] for a in answers]) for name in answers[0]})
        predictions = {
            name: Prediction(
                np.concatenate([predicted[name].bound for _, predicted in found]),
                np.concatenate([predicted[name].std for _, predicted in found]),
                np.concatenate([predicted[name].worst_std for _, predicted in found]),
            )
            for name in found[0][1]
        }
        return answer, predictions

    def stray_rows(self, d_query: Array) -> list[tuple[int, int]]:
        """Return (batch row, query row) of each row of dquery that is not 0, though its cotangents are."""
        stray: list[tuple[int, int]] = []
        for batch in range(len(d_query)):
            sampled = [block.rows for block in self.blocks if block.batch == batch]
            dead = np.ones(d_query.shape[1], bool)
            dead[np.concatenate([*sampled, np.empty(0, np.int64)])] = False
            # As integers without the sign: NaN is not 0, -0 is.
            bits = d_query[batch].view(f"u{d_query.dtype.itemsize}")
            moved = np.fromiter(((plane << 1).any() for plane in bits), bool, len(bits))
            stray += [(batch, int(row)) for row in np.flatnonzero(moved & dead)]
        return stray


@cache
def load_production() -> tuple[Case, ...]:
    """Return the problems of conformance/drawing/production.toml. Raises ValueError naming a broken one."""
    cases: list[Case] = []
    for number, table in enumerate(_table()["case"], start=1):
        try:
            case = case_from_json(table)
            if case.dropout and case.batch * case.kv_heads != 1:
                got = f"batch {case.batch}, kv_heads {case.kv_heads}"
                raise ValueError(f"case field dropout: got {got}, expected 1 and 1")
        except ValueError as error:
            raise ValueError(f"{_FILE.name}, case {number}: {error}") from error
        cases.append(case)
    return tuple(cases)


def host_gib(case: Case) -> float:
    """Return the host memory of a case's inputs, cotangents, outputs and gradients."""
    tokens_q, tokens_k = case.batch * case.q_len * case.q_heads, case.batch * case.kv_len * case.kv_heads
    widths = case.head_dim + case.value_width
    elements = 2 * (tokens_q + tokens_k) * widths
    mask = 0 if case.mask is None else case.q_len * case.kv_len
    return (elements * np.dtype(DTYPES[case.dtype]).itemsize + mask) / 2**30


def build_sampled(case: Case, returns_lse: bool) -> SampledProblem:
    """Make the arrays of a case and choose the blocks, both by its seed."""
    problem = build_bulk(case)
    blocks = _choose(case, problem)
    d_out = np.zeros((*problem.query.shape[:3], problem.value_dim), problem.query.dtype)
    d_lse = np.zeros((problem.batch, problem.q_heads, problem.q_len), np.float32)
    out, lse = (Stream(case.seed, _FIRST_STREAM + number) for number in range(2))
    for block in blocks:
        heads = _heads(problem, block)
        shape = (len(block.rows), problem.group)
        d_out[block.batch, block.rows, heads] = out.normal((*shape, problem.value_dim)).astype(d_out.dtype)
        if returns_lse:
            d_lse[block.batch][heads, block.rows] = lse.normal(shape[::-1]).astype(np.float32)
    return SampledProblem(Built(problem, Cotangents(d_out, d_lse)), blocks)


def _choose(case: Case, problem: Problem) -> tuple[SampledBlock, ...]:
    sizes = _table()["sample"]
    stream = Stream(case.seed, _FIRST_STREAM + 2)
    places = _spread(stream, sizes["blocks"], problem.batch * problem.kv_heads)
    rows = -(-sizes["rows"] // len(places))
    return tuple(
        SampledBlock(
            batch=int(place) // problem.kv_heads,
            kv_head=int(place) % problem.kv_heads,
            rows=_spread(stream, rows, problem.q_len),
            keys=_spread(stream, sizes["keys"], problem.kv_len),
        )
        for place in places
    )


def _spread(stream: Stream, count: int, length: int) -> Ints:
    """Return increasing numbers below `length`: one at random from each of `count` parts, and both ends."""
    if count >= length:
        return np.arange(length, dtype=np.int64)
    edges = np.arange(count + 1) * length // count
    chosen = edges[:-1] + np.floor(stream.uniform((count,)) * np.diff(edges)).astype(np.int64)
    if count > 1:
        chosen[0], chosen[-1] = 0, length - 1
    return chosen


def _heads(problem: Problem, block: SampledBlock) -> slice:
    return slice(block.kv_head * problem.group, (block.kv_head + 1) * problem.group)


def _truth(
    built: Built, block: SampledBlock, semantics: Semantics, numerics: Numerics, gradients: bool
) -> tuple[Answer, dict[str, Prediction]]:
    """Return the answer and the predictions of one block."""
    problem, given = _cut(built, block)
    cotangents = given if gradients else None
    sample = Sample(block.rows, block.keys)
    answer = attention(problem, semantics, cotangents, sample)
    predictions = predict(problem, semantics, numerics, cotangents, sample)
    # A row of few keys is nearly a copy of a value: its errors are not those that the statistics expect, nor
    # are those of the keys that it sees. Without a standard deviation they are held to their bounds alone.
    seen = np.stack([allowed(problem, semantics, 0, head, block.rows) for head in range(problem.group)])
    few = seen.sum(axis=2).min(axis=0) < _table()["sample"]["keys_at_least"]
    seen_by_few = seen[:, few][:, :, block.keys].any(axis=(0, 1))
    for name, prediction in predictions.items():
        if name == "lse":
            prediction.std[:, :, few] = 0.0
        else:
            prediction.std[:, few if name in _ROW_OUTPUTS else seen_by_few] = 0.0
    return answer, predictions


def _cut(built: Built, block: SampledBlock) -> tuple[Problem, Cotangents]:
    """Return the problem of one key head of one batch row, which alone decides its answer."""
    problem, heads = built.problem, _heads(built.problem, block)
    batch, kv_head = slice(block.batch, block.batch + 1), slice(block.kv_head, block.kv_head + 1)
    aux = problem.softmax_aux

    def ids(array: Array | None) -> Array | None:
        return array if array is None or len(array) == 1 else array[batch]

    def lengths(cum: Array | None) -> Array | None:
        if cum is None or problem.batch == 1:
            return cum
        return np.array([0, cum[block.batch + 1] - cum[block.batch]], np.int32)

    slopes, offset = ids(problem.alibi_slopes), problem.q_offset
    if isinstance(offset, np.ndarray) and problem.batch > 1:
        offset = offset[batch]

    def pairs(array: Array | None) -> Array | None:
        if array is None:
            return None
        array = array[batch if len(array) > 1 else slice(None)]
        return array[:, heads] if array.shape[1] > 1 else array

    cut = replace(
        problem,
        query=problem.query[batch, :, heads],
        key=problem.key[batch, :, kv_head],
        value=problem.value[batch, :, kv_head],
        attention_mask=pairs(problem.attention_mask),
        bias=pairs(problem.bias),
        q_segment_ids=ids(problem.q_segment_ids),
        kv_segment_ids=ids(problem.kv_segment_ids),
        cum_seqlens_q=lengths(problem.cum_seqlens_q),
        cum_seqlens_k=lengths(problem.cum_seqlens_k),
        softmax_aux=aux if aux is None or problem.shares_sinks else aux[heads],
        q_offset=offset,
        q_positions=ids(problem.q_positions),
        kv_positions=ids(problem.kv_positions),
        kv_start=ids(problem.kv_start),
        kv_end=ids(problem.kv_end),
        alibi_slopes=None if slopes is None else slopes[:, heads],
        # Dropout goes by the coordinates of the whole.
        origin=tuple(np.add(problem.origin, (block.batch, heads.start, 0, 0)).tolist()),
    )
    d_out, d_lse = built.cotangents.out, built.cotangents.lse
    return cut, Cotangents(d_out[batch, :, heads], None if d_lse is None else d_lse[batch, heads])


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text())


def memory_limit() -> float:
    """Return the host memory in GiB that no listed problem may exceed."""
    return _table()["memory"]["host_gib"]
