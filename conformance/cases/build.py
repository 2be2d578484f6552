"""The arrays of a Case: its Problem and its cotangents, bit for bit the same everywhere."""

from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.axes import own_axes
from attest.conformance.cases.case import Case
from attest.conformance.cases.families import FAMILIES, Stream, Wanted, usual_largest_logit
from attest.reference.oracle import Cotangents
from attest.reference.problem import Problem, make_problem
from attest.reference.semantics import STANDARD, Semantics
from attest.reference.visibility import allowed, padding_rows, pick

Array = NDArray[Any]

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

# Each array draws from a stream of its own, so that switching one feature on leaves the others' values.
_STREAMS = (
    "query",
    "key",
    "value",
    "mask",
    "bias",
    "segments",
    "sinks",
    "d_out",
    "d_lse",
    "dropout",
    "integers",
    "positions",
    "ranges",
    "alibi",
)

_VISIBLE_SHARE = 0.75
_BIAS_HIDDEN_SHARE = 0.25
_EMPTY_ROW_STRIDE = 3
_LARGE_BIAS = 30.0
_WEIGHTLESS = -0.5  # times the largest number of the dtype
_LARGEST_ID = 2**31 - 1
_FARTHEST = 2**30  # positions are below (S23)
_PADDING_IDS = (-1, -7, -(2**31))
_PADDING_SHARE = 0.125


@dataclass(frozen=True)
class Built:
    """The arrays of one case; integer_mask is the mask as the kernel gets it, where that is not bool."""

    problem: Problem
    cotangents: Cotangents
    integer_mask: Array | None = None


def build(case: Case, semantics: Semantics = STANDARD) -> Built:
    """Make a case's arrays. The semantics decide only what is hidden, and so where poison goes."""
    dtype = DTYPES[case.dtype]
    streams = _streams(case)
    wanted = Wanted(
        query=(case.batch, case.q_len, case.q_heads, case.head_dim),
        key=(case.batch, case.kv_len, case.kv_heads, case.head_dim),
        value=(case.batch, case.kv_len, case.kv_heads, case.value_width),
        scale=_scale(case),
        soft_cap=case.soft_cap,
    )
    triple = FAMILIES[case.family](wanted, streams["query"], streams["key"], streams["value"])
    query, key, value = (array.astype(dtype) for array in triple)
    problem = assemble(case, query, key, value, _mask(case, streams["mask"]))
    out_shape = (case.batch, case.q_len, case.q_heads, case.value_width)
    cotangents = Cotangents(
        out=streams["d_out"].normal(out_shape).astype(dtype),
        lse=streams["d_lse"].normal((case.batch, case.q_heads, case.q_len)).astype(np.float32),
    )
    built = Built(problem, cotangents, _integer_mask(case, problem, streams["integers"]))
    return _poisoned(built, semantics) if case.poison else built


def assemble(case: Case, query: Array, key: Array, value: Array, mask: Array | None) -> Problem:
    """Return the problem of a case with these large arrays; its other arrays are made here."""
    streams = _streams(case)
    dtype = DTYPES[case.dtype]
    cum_q, cum_k = _cumulative_lengths(case)
    q_ids, kv_ids = _segment_ids(case, streams["segments"])
    positions = _positions(case, streams["positions"])
    ranges = _ranges(case, streams["ranges"])
    return make_problem(
        query,
        key,
        value,
        attention_mask=mask,
        bias=_bias(case, streams["bias"], dtype),
        softmax_scale=case.scale,
        dropout_prob=case.dropout,
        dropout_seed=_dropout_seed(case, streams["dropout"]),
        dropout_shared=case.dropout_shared,
        causal=case.causal,
        cum_seqlens_q=cum_q,
        cum_seqlens_k=cum_k,
        sliding_window=case.window,
        logits_soft_cap=case.soft_cap,
        softmax_aux=_sinks(case, streams["sinks"], dtype),
        q_segment_ids=q_ids,
        kv_segment_ids=kv_ids,
        normalize_output=case.normalized,
        q_offset=np.array(case.q_offset, np.int32) if isinstance(case.q_offset, tuple) else case.q_offset,
        q_positions=positions.get("q_positions"),
        kv_positions=positions.get("kv_positions"),
        origin=case.origin,
        chunk_size=case.chunk_size,
        kv_start=ranges.get("kv_start"),
        kv_end=ranges.get("kv_end"),
        alibi_slopes=_alibi(case, streams["alibi"]),
    )


def _scale(case: Case) -> float:
    return 1.0 / sqrt(case.head_dim) if case.scale is None else case.scale


def _dropout_seed(case: Case, stream: Stream) -> int | None:
    if not case.dropout:
        return None
    return int(stream.integers(1, 2**53, (1,))[0]) if case.dropout_seed is None else case.dropout_seed


def _streams(case: Case) -> dict[str, Stream]:
    return {name: Stream(case.seed, number) for number, name in enumerate(_STREAMS)}


def pairs_shape(case: Case, axes: str) -> tuple[int, ...]:
    """Return the shape of a mask or bias, by the field of the case that says which axes it has of its own."""
    sizes = (case.batch, case.q_heads, case.q_len, case.kv_len)
    return tuple(size if own else 1 for size, own in zip(sizes, own_axes(axes), strict=True))


def _mask(case: Case, stream: Stream) -> Array | None:
    if case.mask is None:
        return None
    shape = pairs_shape(case, case.mask)
    mask = stream.uniform(shape) < _VISIBLE_SHARE
    if case.empty_rows:
        mask[:, :, ::_EMPTY_ROW_STRIDE] = False
    if case.mask_pattern == "rows":
        mask[:, :, _third("first", case.q_len)] = False
    elif case.mask_pattern != "random":
        mask[..., _third(case.mask_pattern, case.kv_len)] = False
    return mask


def _third(which: str, length: int) -> slice:
    """Return the first, middle or last third of a length: only full blocks of it, if it has six or more."""
    first = {"first": 0, "middle": 1, "last": 2}[which]
    return slice(first * length // 3, (first + 1) * length // 3)


def _integer_mask(case: Case, problem: Problem, stream: Stream) -> Array | None:
    """Return an integer mask: any integer but 0 is visible, negative and even ones too."""
    if not case.integer_mask or problem.attention_mask is None:
        return None
    marks = np.array([-1, 1, 2, 256], np.int32)[stream.integers(0, 4, problem.attention_mask.shape)]
    return np.where(problem.attention_mask, marks, np.int32(0))


def _bias(case: Case, stream: Stream, dtype: Any) -> Array | None:
    if case.bias is None:
        return None
    shape = pairs_shape(case, case.bias)
    bias = stream.normal(shape)
    if case.bias_hides:
        bias = np.where(stream.uniform(shape) < _BIAS_HIDDEN_SHARE, -np.inf, bias)
    if case.bias_pattern == "large":
        bias = _LARGE_BIAS * bias
    elif case.bias_pattern == "lowest":
        bias[..., _third("middle", case.kv_len)] = float(ml_dtypes.finfo(dtype).min)
    elif case.bias_pattern in ("rows", "lowest rows"):
        lowest = -np.inf if case.bias_pattern == "rows" else float(ml_dtypes.finfo(dtype).min)
        bias[:, :, _third("first", case.q_len)] = lowest
    elif case.bias_pattern != "normal":
        bias[..., _third(case.bias_pattern, case.kv_len)] = -np.inf
    return bias.astype(dtype)


def sinks_shape(case: Case) -> tuple[int, ...]:
    """Return the shape of softmax_aux.

    As many shared sinks as heads have an axis of heads, of size 1: without it kernels could not tell them
    from one sink a head.
    """
    if case.sinks_per_head:
        return case.q_heads, case.sinks
    return (1, case.sinks) if case.sinks == case.q_heads > 1 else (case.sinks,)


def _sinks(case: Case, stream: Stream, dtype: Any) -> Array | None:
    if case.sinks == 0:
        return None
    shape = sinks_shape(case)
    usual = usual_largest_logit(case.family, case.head_dim, _scale(case))
    if case.bias_pattern == "large":
        usual += 2 * _LARGE_BIAS
    if case.soft_cap is not None:
        usual = min(max(usual, -case.soft_cap), case.soft_cap)
    sinks = (1.0 if case.sink_pattern == "ones" else usual) + stream.normal(shape)
    if case.sink_pattern == "extreme":
        sinks[..., 0] = _WEIGHTLESS * float(ml_dtypes.finfo(dtype).max)
    return sinks.astype(dtype)


def _segment_ids(case: Case, stream: Stream) -> tuple[Array | None, Array | None]:
    """Return runs of equal ids from 0 up, in both sequences; the last token of a longer one is padding."""
    if case.segments is None:
        return None, None
    if case.segment_pattern == "mixed":
        return _mixed_ids(case, case.q_len, stream), _mixed_ids(case, case.kv_len, stream)
    edges = np.sort(stream.uniform((case.batch, case.segments - 1)), axis=1)

    def ids(length: int) -> Array:
        place = (np.arange(length) + 0.5) / max(length, 1)
        numbers = (place[None, :, None] > edges[:, None, :]).sum(axis=2).astype(np.int32)
        if length > 2:
            numbers[:, -1] = -1
        return numbers

    return ids(case.q_len), ids(case.kv_len)


def _mixed_ids(case: Case, length: int, stream: Stream) -> Array:
    """Return ids in no order, equal in their lowest bits or differing only there; one in eight is padding."""
    shape = (case.batch, length)
    numbers = stream.integers(0, case.segments or 1, shape)
    half = numbers // 2
    ids = np.where(numbers % 2 == 1, _LARGEST_ID - numbers, half * np.where(half % 2 == 1, 1 << 8, 1 << 16))
    padding = np.array(_PADDING_IDS)[stream.integers(0, len(_PADDING_IDS), shape)]
    return np.where(stream.uniform(shape) < _PADDING_SHARE, padding, ids).astype(np.int32)


def position_shapes(case: Case) -> dict[str, tuple[int, int]]:
    """Return the shapes of a case's positions, by name; all batch entries share those of a shard."""
    if case.positions is None:
        return {}
    batch = 1 if case.positions in ("shard", "far") else case.batch
    shapes = {"q_positions": (batch, case.q_len), "kv_positions": (batch, case.kv_len)}
    alone = {"queries": "q_positions", "keys": "kv_positions"}.get(case.positions)
    return shapes if alone is None else {alone: shapes[alone]}


def _positions(case: Case, stream: Stream) -> dict[str, Array]:
    """Return int32 positions of the queries and of the keys, about as far apart as the defaults."""
    shapes = position_shapes(case)
    if not shapes:
        return {}
    found = {name: np.broadcast_to(np.arange(shape[1]), shape) for name, shape in shapes.items()}
    last = case.kv_len - case.q_len
    moved: dict[str, Any] = {"q_positions": last, "kv_positions": 0}
    if case.positions in ("shard", "far"):
        start = stream.integers(1, 4 * case.kv_len + 2, (1, 1))
        if case.positions == "far":
            start = _FARTHEST - 8 * (case.q_len + case.kv_len) + start
        moved["q_positions"] = last + stream.integers(-case.q_len // 2, case.q_len // 2 + 1, (1, 1))
        found = {name: x + start + moved[name] for name, x in found.items()}
    elif case.positions == "repeated":
        found = {name: (x + moved[name]) // 2 for name, x in found.items()}
    elif case.positions == "reversed":
        found = {name: case.kv_len - 1 - x for name, x in found.items()}
    else:
        found = {
            name: np.argsort(stream.uniform(x.shape), axis=1, kind="stable") + moved[name]
            for name, x in found.items()
        }
    return {name: x.astype(np.int32) for name, x in found.items()}


def range_shapes(case: Case) -> dict[str, tuple[int, int]]:
    """Return the shapes of the ends of ranges that a case has, by name."""
    if case.ranges is None:
        return {}
    each, shared = (case.batch, case.q_len), (1, case.q_len)
    alone = {
        "starts": {"kv_start": shared},
        "starts of entries": {"kv_start": each},
        "ends": {"kv_end": each},
        "shared ends": {"kv_end": shared},
    }
    return alone.get(case.ranges, {"kv_start": each, "kv_end": each})


def _ranges(case: Case, stream: Stream) -> dict[str, Array]:
    """Return int32 ends of each row's keys. Of one end alone: no row sees the first, or last, sixth."""
    shapes, keys = range_shapes(case), case.kv_len
    if case.ranges in ("band", "scattered"):
        shape = shapes["kv_start"]
        if case.ranges == "scattered":
            return {name: stream.integers(-2, keys + 3, shape).astype(np.int32) for name in shapes}
        middle = np.arange(case.q_len) + (keys - case.q_len)
        start = middle - stream.integers(0, keys // 4 + 2, shape)
        end = middle + 1 + stream.integers(0, keys // 4 + 2, shape)
        return {"kv_start": start.astype(np.int32), "kv_end": end.astype(np.int32)}
    least, most = (keys // 6, 2 * keys // 3) if "kv_start" in shapes else (keys // 3, keys - keys // 6)
    return {
        name: stream.integers(least, max(most, least) + 1, shape).astype(np.int32)
        for name, shape in shapes.items()
    }


def alibi_shape(case: Case) -> tuple[int, int]:
    """Return the shape of alibi_slopes."""
    return (case.batch if case.alibi == "entries" else 1), case.q_heads


def _alibi(case: Case, stream: Stream) -> Array | None:
    """Return slopes float32: from 1/2 to 1/256 over the heads, as in the paper, or of any sign up to 1/4."""
    if case.alibi is None:
        return None
    shape = alibi_shape(case)
    if case.alibi == "entries":
        return ((stream.uniform(shape) - 0.5) / 2).astype(np.float32)
    steps = np.arange(case.q_heads) / max(case.q_heads - 1, 1)
    return np.exp2(-1 - 7 * steps).astype(np.float32).reshape(shape)


def _cumulative_lengths(case: Case) -> tuple[Array | None, Array | None]:
    if case.lengths is None:
        return None, None
    sides = np.array(case.lengths, np.int64).T
    cum_q, cum_k = (np.concatenate([[0], np.cumsum(side)]).astype(np.int32) for side in sides)
    return cum_q, cum_k


def _poisoned(built: Built, semantics: Semantics) -> Built:
    """Store NaN and inf wherever no clause lets a kernel's result depend on what is stored (S4, S9).

    Keys and values that no query sees, bias entries of pairs that are hidden otherwise, queries and
    cotangents of padding rows; of rows that see no key, too, but for the cotangent of lse where sinks get it.
    """
    problem = built.problem
    key, value = problem.key.copy(), problem.value.copy()
    query, d_out = problem.query.copy(), built.cotangents.out.copy()
    d_lse = None if built.cotangents.lse is None else built.cotangents.lse.copy()
    bias = None if problem.bias is None else problem.bias.copy()
    bias_read = None if bias is None else np.zeros(bias.shape, bool)
    rows = np.arange(problem.q_len, dtype=np.int64)
    poison_empty_rows = semantics.empty_rows == "zero"
    for batch in range(problem.batch):
        padding = padding_rows(problem, semantics, batch)
        query[batch, padding] = np.nan
        d_out[batch, padding] = np.inf
        if d_lse is not None:
            d_lse[batch, :, padding] = np.nan
        read = np.zeros((problem.kv_heads, problem.kv_len), bool)
        for head in range(problem.q_heads):
            permitted = allowed(problem, semantics, batch, head, rows)
            seen = permitted
            if problem.bias is not None and bias_read is not None:
                seen = permitted & ~np.isneginf(pick(problem.bias, batch, head, rows).astype(np.float64))
                _or_into(bias_read, batch, head, permitted)
            read[head // problem.group] |= seen.any(axis=0)
            if poison_empty_rows:
                empty = ~seen.any(axis=1) & ~padding
                query[batch, empty, head] = np.nan
                d_out[batch, empty, head] = np.nan
                if d_lse is not None and problem.softmax_aux is None:
                    d_lse[batch, head, empty] = np.inf
        unread = ~read.T
        key[batch, unread] = np.nan
        value[batch, unread] = np.inf
    if bias is not None and bias_read is not None:
        bias[~bias_read] = np.nan
    poisoned = replace(problem, query=query, key=key, value=value, bias=bias)
    return replace(built, problem=poisoned, cotangents=Cotangents(d_out, d_lse))


def _or_into(read: NDArray[np.bool_], batch: int, head: int, permitted: NDArray[np.bool_]) -> None:
    plane = read[batch if read.shape[0] > 1 else 0, head if read.shape[1] > 1 else 0]
    if plane.shape[1] == 1:
        permitted = permitted.any(axis=1, keepdims=True)
    if plane.shape[0] == len(permitted):
        plane |= permitted
    else:
        plane |= permitted.any(axis=0)
