"""Problems: the arrays and options of one attention call, validated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attest.reference.annotations import (
    AlibiSlopes,
    AttentionMask,
    Bias,
    CumSeqlens,
    KeptWeights,
    Key,
    KVPositions,
    KVRange,
    KVSegmentIds,
    Offsets,
    QPositions,
    QSegmentIds,
    Query,
    Sinks,
    Value,
)
from attest.reference.dropout import check_dropout

Array = NDArray[Any]

FLOAT_DTYPES = tuple(np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32))
BIAS_DTYPES = (*FLOAT_DTYPES, np.dtype(np.float64))

# The difference of two positions fits into 32 bits.
POSITIONS = range(-(2**30), 2**30)
# The product of a slope and a difference of positions is far from what float32 overflows at.
LARGEST_SLOPE = 2.0**64
# A word of a counter of dropout's generator.
_WORDS = 2**32


@dataclass(frozen=True)
class Problem:
    """One attention call. Build it with `make_problem`, which validates.

    query [B, Sq, Hq, D], key [B, Sk, Hkv, D], value [B, Sk, Hkv, Dv]: one of float16, bfloat16, float32.
    attention_mask: bool [B|1, Hq|1, Sq|1, Sk|1]. bias: float, the same.
    q_segment_ids [B, Sq], kv_segment_ids [B, Sk]: int. cum_seqlens_q, cum_seqlens_k: int32 [n + 1].
    softmax_aux: float [sinks] or [1, sinks], which all heads share, or [Hq, sinks].
    dropout_shared: "b", "h" or "bh", the batch entries and heads that one mask of dropout serves; or None.
    dropout_keep: bool [B, Hq, Sq, Sk], the weights that dropout keeps, where no seed says so.
    sliding_window: (left, right), None where unbounded.
    q_offset: int, or int [B], one a sequence; None: the last query stands where the last key does.
    q_positions: int [B|1, Sq]. kv_positions: int [B|1, Sk]. None: as tokens are counted in their sequence.
    origin: where the first batch entry, query head, row and key of this call stand in the whole arrays.
    chunk_size: positions in a chunk. kv_start, kv_end: int [B|1, Sq], the first key that a row may see and
        the one after the last, as keys are counted in the array; None where that side is open.
    alibi_slopes: float32 [Hq] or [B|1, Hq], what a logit loses for each position between row and key.
    """

    query: Query
    key: Key
    value: Value
    attention_mask: AttentionMask | None = None
    bias: Bias | None = None
    softmax_scale: float | None = None
    dropout_prob: float = 0.0
    dropout_seed: int | None = None
    dropout_shared: str | None = None
    dropout_keep: KeptWeights | None = None
    causal: bool = False
    cum_seqlens_q: CumSeqlens | None = None
    cum_seqlens_k: CumSeqlens | None = None
    sliding_window: tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    softmax_aux: Sinks | None = None
    q_segment_ids: QSegmentIds | None = None
    kv_segment_ids: KVSegmentIds | None = None
    normalize_output: bool = True
    q_offset: int | Offsets | None = None
    q_positions: QPositions | None = None
    kv_positions: KVPositions | None = None
    origin: tuple[int, int, int, int] = (0, 0, 0, 0)
    chunk_size: int | None = None
    kv_start: KVRange | None = None
    kv_end: KVRange | None = None
    alibi_slopes: AlibiSlopes | None = None

    @property
    def batch(self) -> int:
        """Sequences in the batch axis, B."""
        return self.query.shape[0]

    @property
    def q_len(self) -> int:
        """Query rows, Sq."""
        return self.query.shape[1]

    @property
    def kv_len(self) -> int:
        """Key rows, Sk."""
        return self.key.shape[1]

    @property
    def q_heads(self) -> int:
        """Query heads, Hq."""
        return self.query.shape[2]

    @property
    def kv_heads(self) -> int:
        """Key and value heads, Hkv."""
        return self.key.shape[2]

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.q_heads // self.kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a query or key vector, D."""
        return self.query.shape[3]

    @property
    def value_dim(self) -> int:
        """Elements of a value vector, Dv."""
        return self.value.shape[3]

    @property
    def shares_sinks(self) -> bool:
        """Whether there are sinks, and all heads share them."""
        aux = self.softmax_aux
        return aux is not None and (aux.ndim == 1 or aux.shape[0] == 1)

    def sinks(self) -> Array | None:
        """Return the sink logits as float64 [Hq, sinks], or None."""
        if self.softmax_aux is None:
            return None
        aux = self.softmax_aux.astype(np.float64)
        return np.broadcast_to(aux, (self.q_heads, aux.shape[-1]))


def make_problem(query: Query, key: Key, value: Value, **options: Any) -> Problem:
    """Validate one attention call.

    Takes Problem's fields by name; an int `sliding_window` w means (w, w), an int mask is true where it is
    not zero and an `origin` of None is all zeros. Raises ValueError naming the argument, what was got and
    what was expected, and TypeError for an option that does not exist and for positions that are no arrays.
    """
    unknown = set(options) - set(Problem.__dataclass_fields__)
    if unknown:
        raise TypeError(f"unknown options {sorted(unknown)}, expected fields of Problem")
    _check_qkv(query, key, value)
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    canonical: dict[str, Any] = dict(options)
    canonical["attention_mask"] = _check_mask(options.get("attention_mask"), shape)
    _check_bias(options.get("bias"), shape)
    _check_scalars(options)
    check_dropout(options, shape)
    # A NumPy scalar of a narrower type would round what it is multiplied with.
    for name, python in (
        ("softmax_scale", float),
        ("logits_soft_cap", float),
        ("dropout_seed", int),
        ("causal", bool),
        ("normalize_output", bool),
    ):
        if options.get(name) is not None:
            canonical[name] = python(options[name])
    canonical["dropout_prob"] = float(options.get("dropout_prob", 0.0))
    canonical["sliding_window"] = _check_window(options.get("sliding_window"))
    _check_sinks(options.get("softmax_aux"), shape[1])
    _check_segments(options, query.shape[:2], key.shape[:2])
    _check_lengths(options, shape)
    canonical["q_offset"] = _check_offset(options, shape)
    for name, length in (("q_positions", shape[2]), ("kv_positions", shape[3])):
        _check_positions(name, options.get(name), shape[0], length)
    for name in ("kv_start", "kv_end"):
        _check_tokens(name, options.get(name), shape[0], shape[2])
    canonical["chunk_size"] = _check_chunk(options.get("chunk_size"))
    canonical["alibi_slopes"] = _check_slopes(options.get("alibi_slopes"), shape)
    canonical["origin"] = _check_origin(options.get("origin"), shape)
    return Problem(query, key, value, **canonical)


def _wrong(argument: str, got: object, expected: str) -> ValueError:
    return ValueError(f"{argument}: got {got}, expected {expected}")


def _check_qkv(query: Array, key: Array, value: Array) -> None:
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            raise _wrong(name, f"shape {array.shape}", "4 axes [batch, length, heads, head dim]")
        if array.dtype not in FLOAT_DTYPES:
            raise _wrong(name, f"dtype {array.dtype}", "float16, bfloat16 or float32")
        if 0 in array.shape[2:]:
            raise _wrong(name, f"shape {array.shape}", "at least one head and one element a head")
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        expected = f"batch {query.shape[0]} and head dim {query.shape[3]}, as in query"
        raise _wrong("key", f"shape {key.shape}", expected)
    if query.shape[2] % key.shape[2]:
        raise _wrong("key", f"{key.shape[2]} heads", f"a divisor of query's {query.shape[2]}")
    if value.shape[:3] != key.shape[:3]:
        raise _wrong("value", f"shape {value.shape}", f"{key.shape[:3]} as key, then any head dim")
    if not query.dtype == key.dtype == value.dtype:
        raise _wrong("key and value", f"dtypes {key.dtype}, {value.dtype}", f"{query.dtype}, as query")


def _check_broadcast(name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Check a shape, each axis of which may be 1."""
    fits = array.ndim == 4 and all(got in (want, 1) for got, want in zip(array.shape, shape, strict=True))
    if not fits:
        raise _wrong(name, f"shape {array.shape}", f"{shape}, each axis of which may be 1")


def _check_mask(mask: Array | None, shape: tuple[int, ...]) -> Array | None:
    if mask is None:
        return None
    if mask.dtype.kind not in "biu":
        raise _wrong("attention_mask", f"dtype {mask.dtype}", "bool or int (an additive mask is a bias)")
    _check_broadcast("attention_mask", mask, shape)
    return mask != 0


def _check_bias(bias: Array | None, shape: tuple[int, ...]) -> None:
    if bias is None:
        return
    if bias.dtype not in BIAS_DTYPES:
        raise _wrong("bias", f"dtype {bias.dtype}", "a float dtype (a bool mask is attention_mask)")
    _check_broadcast("bias", bias, shape)


def _check_scalars(options: Mapping[str, Any]) -> None:
    scale = options.get("softmax_scale")
    if scale is not None and not math.isfinite(scale):
        raise _wrong("softmax_scale", scale, "a finite number or None")
    cap = options.get("logits_soft_cap")
    if cap is not None and not (math.isfinite(cap) and cap > 0):
        raise _wrong("logits_soft_cap", cap, "a finite number above 0 or None")


def _check_window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    sides = (window, window) if isinstance(window, Integral) else tuple(window)
    if len(sides) != 2 or any(
        side is not None and not (isinstance(side, Integral) and int(side) >= 0) for side in sides
    ):
        raise _wrong("sliding_window", window, "an int or (left, right), each None or an int of at least 0")
    left, right = (None if side is None else int(side) for side in sides)
    return left, right


def _check_sinks(aux: Array | None, heads: int) -> None:
    if aux is None:
        return
    if aux.dtype not in BIAS_DTYPES:
        raise _wrong("softmax_aux", f"dtype {aux.dtype}", "a float dtype")
    if aux.ndim not in (1, 2) or (aux.ndim == 2 and aux.shape[0] not in (1, heads)) or aux.shape[-1] == 0:
        expected = f"[sinks], [1, sinks] or [{heads}, sinks], at least one sink"
        raise _wrong("softmax_aux", f"shape {aux.shape}", expected)


def _check_segments(options: Mapping[str, Any], q_shape: tuple[int, ...], kv_shape: tuple[int, ...]) -> None:
    ids = (options.get("q_segment_ids"), options.get("kv_segment_ids"))
    if (ids[0] is None) != (ids[1] is None):
        raise _wrong("q_segment_ids and kv_segment_ids", "one of the two", "both or neither")
    for name, array, shape in zip(("q_segment_ids", "kv_segment_ids"), ids, (q_shape, kv_shape), strict=True):
        if array is None:
            continue
        if array.dtype.kind != "i":
            raise _wrong(name, f"dtype {array.dtype}", "a signed int dtype")
        if array.shape != shape:
            raise _wrong(name, f"shape {array.shape}", f"{shape}")


def _check_lengths(options: Mapping[str, Any], shape: tuple[int, int, int, int]) -> None:
    batch, _, q_len, kv_len = shape
    cum_q: Array | None = options.get("cum_seqlens_q")
    cum_k: Array | None = options.get("cum_seqlens_k")
    if cum_q is None and cum_k is None:
        return
    if cum_q is None or cum_k is None:
        raise _wrong("cum_seqlens_q and cum_seqlens_k", "one of the two", "both or neither")
    if cum_q.shape != cum_k.shape:
        raise _wrong("cum_seqlens_k", f"shape {cum_k.shape}", f"{cum_q.shape}, as cum_seqlens_q")
    for name, cum, length in (("cum_seqlens_q", cum_q, q_len), ("cum_seqlens_k", cum_k, kv_len)):
        if cum.dtype != np.int32 or cum.ndim != 1 or len(cum) < 2:
            raise _wrong(name, f"{cum.dtype} of shape {cum.shape}", "int32 [n + 1] with n >= 1")
        lengths = np.diff(cum)
        if cum[0] != 0 or (lengths < 0).any():
            raise _wrong(name, cum.tolist(), "a non-decreasing sequence that starts at 0")
        if batch > 1 and len(lengths) != batch:
            raise _wrong(name, f"{len(lengths)} sequences", f"{batch}, the batch (or batch 1, packed)")
        longest = cum[-1] if batch <= 1 else lengths.max()
        if longest > length:
            raise _wrong(name, cum.tolist(), f"lengths that fit into {length} tokens")


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _check_offset(options: Mapping[str, Any], shape: tuple[int, int, int, int]) -> int | Array | None:
    offset = options.get("q_offset")
    if offset is None:
        return None
    if options.get("q_positions") is not None:
        raise _wrong("q_offset and q_positions", "both", "at most one of the two")
    if _is_integer(offset):
        offset = np.array(int(offset), object)
    elif not isinstance(offset, np.ndarray):
        raise TypeError(f"q_offset: got {offset!r}, expected an integer or an array of integers")
    elif offset.dtype.kind != "i":
        raise _wrong("q_offset", f"dtype {offset.dtype}", "a signed int dtype")
    batch, _, q_len, _ = shape
    cum: Array | None = options.get("cum_seqlens_q")
    sequences = batch if cum is None else len(cum) - 1
    if offset.shape not in ((), (sequences,)):
        raise _wrong("q_offset", f"shape {offset.shape}", f"an integer or [{sequences}], one a sequence")
    least, most = POSITIONS[0], POSITIONS[-1] - max(q_len - 1, 0)
    if np.any(offset < least) or np.any(offset > most):
        raise _wrong("q_offset", offset.tolist(), f"numbers from {least} to {most}")
    return int(offset) if offset.ndim == 0 else offset


def _check_tokens(name: str, numbers: Any, batch: int, length: int) -> None:
    """Check for an integer for each token."""
    if numbers is None:
        return
    if not isinstance(numbers, np.ndarray):
        raise TypeError(f"{name}: got {type(numbers).__name__}, expected an array of integers")
    if numbers.dtype.kind != "i":
        raise _wrong(name, f"dtype {numbers.dtype}", "a signed int dtype")
    if numbers.shape not in ((1, length), (batch, length)):
        raise _wrong(name, f"shape {numbers.shape}", f"{(batch, length)}, the first axis of which may be 1")


def _check_positions(name: str, positions: Any, batch: int, length: int) -> None:
    _check_tokens(name, positions, batch, length)
    if positions is None:
        return
    outside = (positions < POSITIONS[0]) | (positions > POSITIONS[-1])
    if outside.any():
        expected = f"positions from {POSITIONS[0]} to {POSITIONS[-1]}"
        raise _wrong(name, int(positions[outside][0]), expected)


def _check_chunk(size: Any) -> int | None:
    if size is None:
        return None
    if not _is_integer(size) or not 0 < int(size) < 2**31:
        raise _wrong("chunk_size", size, "an integer above 0 that 32 bits hold, or None")
    return int(size)


def _check_slopes(slopes: Any, shape: tuple[int, int, int, int]) -> Array | None:
    """Return the slopes as [B or 1, Hq]."""
    if slopes is None:
        return None
    if not isinstance(slopes, np.ndarray):
        raise TypeError(f"alibi_slopes: got {type(slopes).__name__}, expected an array of float32")
    if slopes.dtype != np.float32:
        raise _wrong("alibi_slopes", f"dtype {slopes.dtype}", "float32")
    batch, heads, _, _ = shape
    if slopes.shape not in ((heads,), (1, heads), (batch, heads)):
        raise _wrong("alibi_slopes", f"shape {slopes.shape}", f"({heads},) or {(batch, heads)}")
    # NaN is not in the range either.
    outside = ~(np.abs(slopes) <= LARGEST_SLOPE)
    if outside.any():
        expected = f"finite numbers of at most {LARGEST_SLOPE:.3g} in size"
        raise _wrong("alibi_slopes", float(slopes[outside][0]), expected)
    return slopes.reshape(-1, heads)


def _check_origin(origin: Any, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    if origin is None:
        return 0, 0, 0, 0
    try:
        first = tuple(origin)
    except TypeError:
        first = ()
    fits = len(first) == 4 and all(
        _is_integer(start) and 0 <= int(start) <= _WORDS - size
        for start, size in zip(first, shape, strict=True)
    )
    if not fits:
        expected = "four integers of at least 0: batch entry, query head, row and key, all below 2**32"
        raise _wrong("origin", origin, expected)
    batch, head, row, key = (int(start) for start in first)
    return batch, head, row, key
