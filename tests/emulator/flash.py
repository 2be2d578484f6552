"""What a kernel of a given arithmetic answers: flash attention, forward and backward, in NumPy float32.

Which pairs are visible, dropped and biased comes from the oracle's row blocks: this module emulates
roundings, not clauses. Everything is float32 unless `Arithmetic` says otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attest.reference.numerics import Numerics
from attest.reference.oracle import Cotangents
from attest.reference.problem import Problem
from attest.reference.rows import RowBlock, row_blocks
from attest.reference.semantics import Semantics

F32 = NDArray[np.float32]


def _round_bits(x: F32, bits: int) -> F32:
    """Round a float32 to nearest, ties to even, with `bits` fewer significant bits."""
    word = np.ascontiguousarray(x, np.float32).view(np.uint32)
    odd = (word >> np.uint32(bits)) & np.uint32(1)
    rounded = (word + np.uint32((1 << (bits - 1)) - 1) + odd) & np.uint32(0xFFFFFFFF << bits & 0xFFFFFFFF)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


def _truncate_bits(x: F32, bits: int) -> F32:
    word = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (word & np.uint32(0xFFFFFFFF << bits & 0xFFFFFFFF)).view(np.float32)


def _through(dtype: Any) -> Callable[[F32], F32]:
    return lambda x: x.astype(dtype).astype(np.float32)


# How a float32 number is stored, by name.
ROUND: dict[str, Callable[[F32], F32]] = {
    "float32": lambda x: x,
    "bfloat16": _through(ml_dtypes.bfloat16),
    "float16": _through(np.float16),
    "tf32": lambda x: _round_bits(x, 13),
    "float32_chopped": lambda x: x,
    "bfloat16_chopped": lambda x: _truncate_bits(x, 16),
    "float16_chopped": lambda x: _truncate_bits(x, 13),
}


def second_degree_exp(x: F32) -> F32:
    """2**(x log2 e) with a polynomial of degree 2 for the fraction: wrong by up to 0.2 %."""
    y = np.maximum(x * np.float32(np.log2(np.e)), np.float32(-126.0))
    whole = np.floor(y)
    f = (y - whole).astype(np.float32)
    polynomial = np.float32(1.0024) + f * (np.float32(0.6511) + f * np.float32(0.3437))
    return np.where(np.isneginf(x), np.float32(0.0), np.ldexp(polynomial, whole.astype(np.int32)))


@dataclass(frozen=True)
class Arithmetic:
    """Every rounding of the emulated kernel; formats by their name in ROUND.

    dtype: of the inputs and outputs. weights: of P and dS before the second product. operands: of what
    enters a dot. prescaled: of q once it is multiplied by the scale, None where the logits are scaled.
    *_accumulator: what the sums over blocks are stored in. delta: of rowsum(dO * O). sink_terms: of the
    gradients of the sinks before they are summed. slope: whether the cap is differentiated.
    other_bits: the backward pass sums the channels of a logit in reverse, as another tiling of it may.
    materialised: weights are normalised before the cast and kept, dP is stored in `d_weights`.
    """

    dtype: Any
    weights: str = "float32"
    operands: str = "float32"
    prescaled: str | None = None
    out_accumulator: str = "float32"
    query_accumulator: str = "float32"
    key_accumulator: str = "float32"
    sum_accumulator: str = "float32"
    delta: str = "float32"
    d_weights: str = "float32"
    sink_terms: str = "float32"
    lse: str = "float32"
    slope: bool = True
    other_bits: bool = False
    exp: Callable[[F32], F32] = np.exp
    key_block: int = 64
    query_block: int = 64
    materialised: bool = False


HALF_SUBNORMAL = {"float16": 2.0**-25, "bfloat16": 2.0**-134}
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def correct(dtype: str, **options: Any) -> tuple[Arithmetic, Numerics]:
    """The usual flash kernel of a dtype, and its honest declaration."""
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    arithmetic = Arithmetic(kind, weights=dtype, **options)
    numerics = Numerics(
        output_dtype=dtype,
        weights=UNIT[dtype],
        half_subnormal=HALF_SUBNORMAL.get(dtype, 0.0),
        exponential=2.0**-23,
        tanh=2.0**-22,
        key_block=None if arithmetic.materialised else arithmetic.key_block,
        lse=UNIT[arithmetic.lse],
        d_weights=0.0 if arithmetic.d_weights == "float32" else UNIT[arithmetic.d_weights],
        materialised=arithmetic.materialised,
    )
    return arithmetic, numerics


@dataclass
class _Head:
    """One head's arrays: what the oracle's blocks say is visible, and what the forward pass leaves."""

    query: F32
    key: F32
    value: F32
    seen: NDArray[np.bool_]
    weighed: NDArray[np.bool_]
    present: NDArray[np.bool_]
    stand_in: NDArray[np.bool_]
    keep: F32 | None
    bias: F32 | None
    alibi: F32 | None
    sinks: F32
    sink_slope: F32
    padding: NDArray[np.bool_]
    scale: np.float32
    cap: np.float32 | None
    out: F32 | None = None
    lse: F32 | None = None
    row_max: F32 | None = None
    weights: F32 | None = None

    def with_bias(self, s: F32, rows: slice, columns: slice) -> F32:
        """The logits of a tile with bias and ALiBi."""
        for term in (self.bias, self.alibi):
            s = s if term is None else s + term[rows, columns]
        return s


class Emulator:
    """One kernel: a problem, a dialect and an arithmetic."""

    def __init__(self, problem: Problem, semantics: Semantics, arithmetic: Arithmetic) -> None:
        self.problem, self.semantics, self.arithmetic = problem, semantics, arithmetic
        self.heads: dict[tuple[int, int], _Head] = {}
        with np.errstate(all="ignore"):
            gathered: dict[tuple[int, int], list[RowBlock]] = {}
            for block in row_blocks(problem, semantics):
                gathered.setdefault((block.batch, block.head), []).append(block)
            self.heads = {at: self._head(blocks) for at, blocks in gathered.items()}

    def run(self, cotangents: Cotangents | None = None) -> dict[str, NDArray[Any]]:
        """out and lse as the kernel returns them; the gradients too if cotangents are given."""
        with np.errstate(all="ignore"):
            answer = self._forward()
            if cotangents is not None:
                answer |= self._backward(cotangents)
        return answer

    def _head(self, blocks: list[RowBlock]) -> _Head:
        first = blocks[0]

        def joined(name: str) -> Any:
            parts = [getattr(block, name) for block in blocks]
            return None if parts[0] is None else np.concatenate(parts, axis=0)

        keep, bias, distance = joined("keep"), joined("bias"), joined("distance")
        seen, logits = joined("seen"), joined("logits")
        # A kernel that hides a key never lets what is stored there into a sum.
        key = np.where(np.isfinite(first.key), first.key, 0.0).astype(np.float32)
        value = np.where(np.isfinite(first.value), first.value, 0.0).astype(np.float32)
        cap = self.problem.logits_soft_cap
        return _Head(
            query=joined("query").astype(np.float32),
            key=key,
            value=value,
            seen=seen,
            weighed=joined("weighed"),
            present=~np.isneginf(logits),
            stand_in=logits == self.semantics.sentinel,
            keep=None if keep is None else keep.astype(np.float32),
            bias=None if bias is None else np.where(np.isneginf(bias), 0.0, bias).astype(np.float32),
            alibi=None if distance is None else np.float32(-first.slope) * distance.astype(np.float32),
            sinks=first.sink_logits.astype(np.float32),
            sink_slope=first.sink_slope.astype(np.float32),
            padding=joined("padding"),
            scale=np.float32(first.dot_scale),
            cap=None if cap is None else np.float32(cap),
        )

    def _logits(self, head: _Head, rows: slice, columns: slice, again: bool = False) -> tuple[F32, F32]:
        """The logits of a tile, -inf where hidden, and the slope of the cap. again: in the backward pass."""
        a = self.arithmetic
        into = ROUND[a.operands]
        channels = slice(None, None, -1 if again and a.other_bits else 1)
        query, key = head.query[rows, channels], into(head.key[columns, channels])
        if a.prescaled is not None:
            s = into(ROUND[a.prescaled](query * head.scale)) @ key.T
        else:
            s = into(query) @ key.T
            if self.semantics.bias == "before_scale":
                s = head.with_bias(s, rows, columns)
            s = s * head.scale
        if self.semantics.bias == "before_cap":
            s = head.with_bias(s, rows, columns)
        slope = np.ones((1, 1), np.float32)
        if head.cap is not None:
            tanh = np.tanh(s / head.cap)
            s = head.cap * tanh
            if a.slope:
                slope = 1 - tanh * tanh
        if self.semantics.bias == "after_cap":
            s = head.with_bias(s, rows, columns)
        s = np.where(head.stand_in[rows, columns], np.float32(self.semantics.sentinel), s)
        return np.where(head.present[rows, columns], s, np.float32(-np.inf)), slope

    def _forward(self) -> dict[str, NDArray[Any]]:
        problem, a = self.problem, self.arithmetic
        out = np.zeros((problem.batch, problem.q_len, problem.q_heads, problem.value_dim), a.dtype)
        lse_dtype = np.float32 if a.lse == "float32" else np.dtype(getattr(ml_dtypes, a.lse, None) or a.lse)
        lse = np.zeros((problem.batch, problem.q_heads, problem.q_len), lse_dtype)
        for (batch, number), head in self.heads.items():
            (self._whole if a.materialised else self._online)(head)
            assert head.out is not None
            assert head.lse is not None
            out[batch, :, number] = head.out.astype(a.dtype)
            base = np.float32(np.log(2.0)) if self.semantics.lse_base == "two" else np.float32(1.0)
            lse[batch, number] = (head.lse / base).astype(lse_dtype)
        return {"out": out, "lse": lse}

    def _online(self, head: _Head) -> None:
        a = self.arithmetic
        into, weights = ROUND[a.operands], ROUND[a.weights]
        rows = slice(0, len(head.query))
        # The sinks, a padding row aside, are the first block of the online softmax.
        row_max = np.full(len(head.query), head.sinks.max(initial=-np.inf), np.float32)
        total = a.exp(head.sinks[None, :] - _finite(row_max)[:, None]).sum(axis=1, dtype=np.float32)
        out = np.zeros((len(head.query), head.value.shape[1]), np.float32)
        for start in range(0, len(head.key), a.key_block):
            columns = slice(start, start + a.key_block)
            s, _ = self._logits(head, rows, columns)
            highest = np.maximum(row_max, s.max(axis=1, initial=-np.inf))
            shift = _finite(highest)
            p = np.where(np.isneginf(s), np.float32(0), a.exp(s - shift[:, None]))
            rescale = np.where(np.isneginf(row_max), np.float32(0), a.exp(row_max - shift))
            total = ROUND[a.sum_accumulator](total * rescale + p.sum(axis=1, dtype=np.float32))
            if head.keep is not None:
                p = p * head.keep[rows, columns]
            block = into(weights(p)) @ into(head.value[columns])
            out = ROUND[a.out_accumulator](out * rescale[:, None] + block)
            row_max = highest
        head.row_max = row_max
        empty = (total == 0) | (head.padding & (self.semantics.hidden == "absent"))
        total = np.where(total == 0, np.float32(1), total)
        head.lse = np.where(empty, np.float32(-np.inf), row_max + np.log(total))
        normalised = out / total[:, None] if self.problem.normalize_output else out
        head.out = np.where(head.padding[:, None], np.float32(0), normalised)

    def _whole(self, head: _Head) -> None:
        a = self.arithmetic
        s, _ = self._logits(head, slice(None), slice(None))
        row_max = np.maximum(s.max(axis=1, initial=-np.inf), head.sinks.max(initial=-np.inf))
        shift = _finite(row_max)
        p = np.where(np.isneginf(s), np.float32(0), a.exp(s - shift[:, None]))
        sinks = a.exp(head.sinks[None, :] - shift[:, None])
        total = p.sum(axis=1, dtype=np.float32) + sinks.sum(axis=1, dtype=np.float32)
        empty = (total == 0) | (head.padding & (self.semantics.hidden == "absent"))
        total = np.where(total == 0, np.float32(1), total)
        head.weights = np.where(head.padding[:, None], np.float32(0), p / total[:, None])
        head.lse = np.where(empty, np.float32(-np.inf), row_max + np.log(total))
        if self.semantics.empty_rows == "mean_of_values":
            means = np.isneginf(row_max) & ~head.padding
            head.weights[means] = np.float32(1 / max(len(head.key), 1))
        kept = head.weights if head.keep is None else head.weights * head.keep
        factor = np.float32(1) if self.problem.normalize_output else total[:, None]
        head.out = (ROUND[a.operands](ROUND[a.weights](kept)) @ ROUND[a.operands](head.value)) * factor
        head.row_max = row_max

    def _backward(self, cotangents: Cotangents) -> dict[str, NDArray[Any]]:
        problem, a = self.problem, self.arithmetic
        d_query = np.zeros(problem.query.shape, np.float32)
        d_key = np.zeros(problem.key.shape, np.float32)
        d_value = np.zeros(problem.value.shape, np.float32)
        d_bias = None if problem.bias is None else np.zeros(problem.bias.shape, np.float32)
        aux = problem.softmax_aux
        d_sinks = None if aux is None else np.zeros((problem.q_heads, aux.shape[-1]), np.float32)
        for (batch, number), head in self.heads.items():
            kv = (batch, slice(None), number // problem.group)
            gradient = _Gradient(d_query[batch, :, number], d_key[kv], d_value[kv], None, None)
            if d_bias is not None:
                gradient.bias = d_bias[
                    batch if d_bias.shape[0] > 1 else 0, number if d_bias.shape[1] > 1 else 0
                ]
            if d_sinks is not None:
                gradient.sinks = d_sinks[number]
            d_out = cotangents.out[batch, :, number].astype(np.float32)
            d_lse = np.zeros(problem.q_len, np.float32)
            if cotangents.lse is not None and self.semantics.lse_gradient:
                d_lse = cotangents.lse[batch, number].astype(np.float32)
            if self.semantics.lse_base == "two":
                d_lse = d_lse / np.float32(np.log(2.0))
            self._backward_head(head, d_out, d_lse, gradient)
        answer = {"dquery": d_query.astype(a.dtype), "dkey": d_key.astype(a.dtype)}
        answer["dvalue"] = d_value.astype(a.dtype)
        if d_bias is not None and problem.bias is not None:
            answer["dbias"] = d_bias.astype(problem.bias.dtype)
        if d_sinks is not None and aux is not None:
            total = d_sinks.sum(axis=0).reshape(aux.shape) if problem.shares_sinks else d_sinks
            answer["dsoftmax_aux"] = total.astype(aux.dtype)
        return answer

    def _backward_head(self, head: _Head, d_out: F32, d_lse: F32, gradient: "_Gradient") -> None:
        problem, a = self.problem, self.arithmetic
        assert head.out is not None
        assert head.lse is not None
        assert head.row_max is not None
        weighs = head.weighed.any(axis=1)
        live = weighs | ((len(head.sinks) > 0) & ~head.padding)
        d_out = np.where(weighs[:, None], d_out, np.float32(0))
        d_lse = np.where(live, d_lse, np.float32(0))
        lse = np.where(np.isneginf(head.lse), np.float32(0), head.lse)
        stored = _finite(head.out.astype(a.dtype).astype(np.float32))
        delta = (d_out * stored).sum(axis=1, dtype=np.float32)
        if not problem.normalize_output:
            factor = np.where(live, np.exp(lse - _finite(head.row_max)), np.float32(0))
            d_out = d_out * factor[:, None]
            delta = np.zeros_like(delta)
        elif a.materialised:
            kept = head.weights if head.keep is None else head.weights * head.keep
            assert kept is not None
            delta = (kept * self._d_weights(head, d_out, slice(None), slice(None), drop=False)).sum(
                axis=1, dtype=np.float32
            )
        d_row = d_lse - ROUND[a.delta](delta)

        into, weights = ROUND[a.operands], ROUND[a.weights]
        for k in range(0, len(head.key), a.key_block):
            columns = slice(k, k + a.key_block)
            for q in range(0, len(head.query), a.query_block):
                rows = slice(q, q + a.query_block)
                s, slope = self._logits(head, rows, columns, again=True)
                if head.weights is not None:
                    p = head.weights[rows, columns]
                else:
                    p = np.where(np.isneginf(s), np.float32(0), a.exp(s - lse[rows, None]))
                kept = p if head.keep is None else p * head.keep[rows, columns]
                d_p = self._d_weights(head, d_out, rows, columns, drop=True)
                d_s = np.where(head.seen[rows, columns], p * (d_p + d_row[rows, None]), np.float32(0))
                d_u = np.where(head.seen[rows, columns], d_s * slope, np.float32(0))
                gradient.value[columns] += into(weights(kept)).T @ into(d_out[rows])
                cast = into(weights(d_u))
                key = gradient.key[columns] + (cast.T @ into(head.query[rows])) * head.scale
                gradient.key[columns] = ROUND[a.key_accumulator](key)
                query = gradient.query[rows] + (cast @ into(head.key[columns])) * head.scale
                gradient.query[rows] = ROUND[a.query_accumulator](query)
                if gradient.bias is not None:
                    d_b = d_s if self.semantics.bias == "after_cap" else d_u
                    d_b = d_b * head.scale if self.semantics.bias == "before_scale" else d_b
                    if gradient.bias.shape[0] > 1:
                        gradient.bias[rows, columns] += d_b
                    else:
                        gradient.bias[0, columns] += d_b.sum(axis=0, dtype=np.float32)
        if gradient.sinks is not None:
            exponent = head.sinks[None, :] - lse[:, None]
            p = np.where(live[:, None], a.exp(exponent), np.float32(0))
            terms = ROUND[a.sink_terms](p * d_row[:, None] * head.sink_slope)
            gradient.sinks += terms.sum(axis=0, dtype=np.float32)

    def _d_weights(self, head: _Head, d_out: F32, rows: slice, columns: slice, drop: bool) -> F32:
        a = self.arithmetic
        into = ROUND[a.operands]
        d_p = ROUND[a.d_weights](into(d_out[rows]) @ into(head.value[columns]).T)
        return d_p if head.keep is None or not drop else d_p * head.keep[rows, columns]


@dataclass
class _Gradient:
    """Where one head's gradients are summed: views into the arrays of all heads."""

    query: F32
    key: F32
    value: F32
    bias: F32 | None
    sinks: F32 | None


def _finite(x: F32) -> F32:
    return np.where(np.isfinite(x), x, np.float32(0))
