"""Malformed attention calls: each replaces arguments of a well-formed call by malformed ones.

The well-formed call has a batch of 2, 2 query and key heads, and equal numbers of queries and keys.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attest.conformance.subject import Subject

Arguments = dict[str, Any]
Spoil = Callable[[Arguments], Arguments]
Sums = Callable[[int], list[int]]  # cumulative lengths, from the length of their array


@dataclass(frozen=True)
class Malformed:
    """One way to make a call malformed.

    spoil: from the well-formed arguments to those that replace them. names: the refusal must contain one of
    these words. feature: the call is tested only if the subject supports it. applies: the
    subjects for which the call is malformed. values: whether the values of an array alone are wrong, which
    shapes and dtypes do not tell.
    """

    spoil: Spoil
    names: tuple[str, ...]
    feature: str | None = None
    applies: Callable[[Subject], bool] = lambda _subject: True
    values: bool = False


# Where arrays contradict each other, the refusal may name any of them.
_QKV = ("query", "key", "value")
_SEGMENT = ("segment",)
_LENGTH = ("seqlen", "length")
_SINK = ("softmax_aux", "sink")
_HUGE = 10**400  # an integer that no float holds
_BEYOND_FLOAT32 = 1e39


def _set(**arguments: Any) -> Spoil:
    return lambda _given: arguments


def _each(names: tuple[str, ...], change: Callable[[NDArray[Any]], NDArray[Any]]) -> Spoil:
    return lambda given: {name: change(given[name]) for name in names}


def _plane(dtype: Any, *, heads: int = 1, extra: int = 0) -> Callable[[Arguments], NDArray[Any]]:
    """Return ones of the shape of a mask or bias, with `extra` rows and keys too many."""

    def ones(given: Arguments) -> NDArray[Any]:
        return np.ones((1, heads, given["query"].shape[1] + extra, given["key"].shape[1] + extra), dtype)

    return ones


def _made(name: str, make: Callable[[Arguments], NDArray[Any]]) -> Spoil:
    return lambda given: {name: make(given)}


def _ids(
    sides: tuple[str, ...] = ("q", "kv"), extra: Mapping[str, int] | None = None, dtype: Any = np.int32
) -> Spoil:
    """Return segment ids of some sides, with `extra` tokens too many."""

    def make(given: Arguments) -> Arguments:
        shapes = {"q": given["query"].shape[:2], "kv": given["key"].shape[:2]}
        return {
            f"{side}_segment_ids": np.zeros(
                (shapes[side][0], shapes[side][1] + (extra or {}).get(side, 0)), dtype
            )
            for side in sides
        }

    return make


def _sums(q: Sums | None, k: Sums | None, *, packed: bool, dtype: str = "int32") -> Spoil:
    """Return cumulative lengths, each from its array's length; None leaves one out. Packed: batch 1."""

    def make(given: Arguments) -> Arguments:
        sides = {"cum_seqlens_q": (q, "query"), "cum_seqlens_k": (k, "key")}
        cums = {
            name: np.array(sums(given[array].shape[1]), dtype)
            for name, (sums, array) in sides.items()
            if sums is not None
        }
        return cums | ({name: given[name][:1] for name in _QKV} if packed else {})

    return make


def _well(_length: int) -> list[int]:
    return [0, 2, 4]


def _four(_length: int) -> list[int]:
    return [0, 1, 2, 3, 4]


# What can be wrong with what shares one mask of dropout.
_WRONG_SHARED = {"order": "hb", "empty": "", "unknown": "k", "flag": True, "list": ["b", "h"]}
# What can be wrong with an origin.
_WRONG_ORIGINS: Mapping[str, Any] = {
    "number": 4,
    "short": (0, 0, 0),
    "long": (0, 0, 0, 0, 0),
    "negative": (0, 0, -1, 0),
    "beyond_32_bits": (0, 2**32, 0, 0),
    "float": (0, 0.5, 0, 0),
    "nan": (float("nan"), 0, 0, 0),
}

# What can be wrong with the slopes of ALiBi.
_WRONG_SLOPES: Mapping[str, Any] = {
    "number": 0.5,
    "heads": np.ones(3, np.float32),
    "batch": np.ones((3, 2), np.float32),
    "rank": np.ones((1, 1, 2), np.float32),
    "int": np.ones(2, np.int32),
    "bfloat16": np.ones(2, ml_dtypes.bfloat16),
    "nan": np.array([1, np.nan], np.float32),
    "infinite": np.array([np.inf, 1], np.float32),
}

# Of these the values alone are wrong.
_WRONG_VALUES = ("nan", "infinite", "decreasing", "not_from_zero", "too_long")

# What can be wrong with the cumulative lengths of either side.
_WRONG_SUMS: Mapping[str, Sums] = {
    "decreasing": lambda _length: [0, 4, 2],
    "not_from_zero": lambda _length: [1, 2, 4],
    "too_long": lambda length: [0, 2, 2 * length + 3],
    "empty": lambda _length: [],
}


def _wrong_lengths(start: str, *, packed: bool) -> dict[str, Malformed]:
    """Return every malformed pair of cumulative lengths: a padded batch of 2, or 2 packed sequences."""

    def one(q: Sums | None, k: Sums | None, dtype: str = "int32", wrong: str = "") -> Malformed:
        feature = "packed" if packed else "padded"
        spoil = _sums(q, k, packed=packed, dtype=dtype)
        return Malformed(spoil, _LENGTH, feature, values=wrong in _WRONG_VALUES)

    found = {f"{start}_{wrong}": one(sums, _well, wrong=wrong) for wrong, sums in _WRONG_SUMS.items()}
    found |= {f"{start}_k_{wrong}": one(_well, sums, wrong=wrong) for wrong, sums in _WRONG_SUMS.items()}
    return found | {
        f"{start}_one_sided": one(_well, None),
        f"{start}_k_one_sided": one(None, _well),
        f"{start}_float": one(_well, _well, "float32"),
        f"{start}_unequal": one(_well, lambda _length: [0, 2, 3, 4]),
    }


def _numbers(option: str, words: tuple[str, ...], feature: str, **wrong: Any) -> dict[str, Malformed]:
    """Return one entry for each wrong value of a number. A dropout rate is given with a dropout seed."""
    seed = {"dropout_seed": 1} if option == "dropout_prob" else {}
    return {name: Malformed(_set(**{option: value}, **seed), words, feature) for name, value in wrong.items()}


def _positions(
    side: str, *, extra: int = 0, batch: int | None = None, fill: float = 0, dtype: Any = np.int32
) -> Spoil:
    """Return positions of one side, all `fill`, with `extra` tokens too many and another batch size."""

    def make(given: Arguments) -> Arguments:
        entries, length = given[{"q": "query", "kv": "key"}[side]].shape[:2]
        shape = (entries if batch is None else batch, length + extra)
        return {f"{side}_positions": np.full(shape, fill, dtype)}

    return make


def _wrong_positions(side: str) -> dict[str, Malformed]:
    """Return every malformed array of positions of one side."""
    spoils = {
        "shape": _positions(side, extra=1),
        "batch": _positions(side, batch=3),
        "rank": lambda given: {f"{side}_positions": _positions(side)(given)[f"{side}_positions"][0]},
        "float": _positions(side, dtype=np.float32),
        "nan": _positions(side, fill=np.nan, dtype=np.float32),
    }
    return {
        f"{side}_positions_{wrong}": Malformed(spoil, (f"{side}_positions",), "positions")
        for wrong, spoil in spoils.items()
    }


def _ends(*, extra: int = 0, batch: int | None = None, dtype: Any = np.int32) -> Spoil:
    """Return ends of ranges, all 1, with `extra` rows too many and another number of batch entries."""

    def make(given: Arguments) -> Arguments:
        entries, length = given["query"].shape[:2]
        return {"kv_end": np.ones((entries if batch is None else batch, length + extra), dtype)}

    return make


def _offset_and_positions(given: Arguments) -> Arguments:
    return {"q_offset": 1} | _positions("q")(given)


MALFORMED: Mapping[str, Malformed] = {
    "unknown_option": Malformed(_set(no_such_option=1), ("no_such_option",)),
    "query_rank": Malformed(_each(("query",), lambda x: x[0, 0]), _QKV),
    "key_rank": Malformed(_each(("key",), lambda x: x[..., 0]), _QKV),
    "value_rank": Malformed(_each(("value",), lambda x: x[..., 0]), _QKV),
    "query_batch": Malformed(_each(("query",), lambda x: x[:1]), _QKV),
    "key_batch": Malformed(_each(("key",), lambda x: x[:1]), _QKV),
    "key_value_batch": Malformed(_each(("key", "value"), lambda x: x[:1]), _QKV),
    "key_head_dim": Malformed(_each(("key",), lambda x: np.repeat(x, 2, axis=3)), _QKV),
    "key_head_dim_one": Malformed(_each(("key",), lambda x: x[..., :1]), _QKV),
    "head_dim_zero": Malformed(_each(("query", "key"), lambda x: x[..., :0]), (*_QKV, "head")),
    "value_length": Malformed(_each(("value",), lambda x: x[:, 1:]), _QKV),
    "value_length_one": Malformed(_each(("value",), lambda x: x[:, :1]), _QKV),
    "value_heads": Malformed(_each(("value",), lambda x: x[:, :, :1]), _QKV),
    "heads_not_divisible": Malformed(
        _each(("key", "value"), lambda x: np.concatenate([x, x[:, :, :1]], axis=2)), _QKV
    ),
    "more_key_heads": Malformed(_each(("key", "value"), lambda x: np.repeat(x, 2, axis=2)), _QKV),
    "key_dtype": Malformed(_each(("key",), lambda x: x.astype(np.int8)), ("key", "dtype")),
    "mixed_dtypes": Malformed(
        _each(("key",), lambda x: x.astype(np.float16 if x.dtype == np.float32 else np.float32)),
        (*_QKV, "dtype"),
    ),
    "integer_inputs": Malformed(_each(_QKV, lambda x: np.ones(x.shape, np.int32)), ("query", "dtype")),
    **_numbers(
        "softmax_scale",
        ("scale",),
        "scale",
        scale_nan=float("nan"),
        scale_infinite=float("inf"),
        scale_beyond_float32=_BEYOND_FLOAT32,
        scale_huge=_HUGE,
    ),
    "mask_shape": Malformed(_made("attention_mask", _plane(bool, extra=1)), ("mask",), "mask"),
    "mask_heads": Malformed(_made("attention_mask", _plane(bool, heads=3)), ("mask",), "mask"),
    "mask_float": Malformed(_made("attention_mask", _plane(np.float32)), ("mask",), "mask"),
    "bias_shape": Malformed(_made("bias", _plane(np.float32, extra=1)), ("bias",), "bias"),
    "bias_heads": Malformed(_made("bias", _plane(np.float32, heads=3)), ("bias",), "bias"),
    "bias_bool": Malformed(_made("bias", _plane(bool)), ("bias",), "bias"),
    "bias_int": Malformed(_made("bias", _plane(np.int32)), ("bias",), "bias"),
    **_numbers(
        "sliding_window",
        ("window",),
        "window",
        window_negative=(-1, 1),
        window_negative_right=(1, -1),
        window_negative_number=-1,
        window_triple=(1, 1, 1),
        window_single=(1,),
        window_float=(1.5, 1),
        window_float_number=1.5,
    ),
    **_numbers(
        "logits_soft_cap",
        ("cap",),
        "soft_cap",
        soft_cap_zero=0.0,
        soft_cap_negative=-1.0,
        soft_cap_nan=float("nan"),
        soft_cap_infinite=float("inf"),
        soft_cap_beyond_float32=_BEYOND_FLOAT32,
        soft_cap_huge=_HUGE,
    ),
    **_numbers(
        "dropout_prob",
        ("dropout",),
        "dropout",
        dropout_one=1.0,
        dropout_negative=-0.1,
        dropout_nan=float("nan"),
        dropout_beyond_float32=_BEYOND_FLOAT32,
        dropout_huge=_HUGE,
    ),
    **_numbers(
        "q_offset",
        ("q_offset",),
        "q_offset",
        q_offset_float=0.5,
        q_offset_nan=float("nan"),
        q_offset_beyond_int32=2**31,
        q_offset_float_array=np.zeros(2, np.float32),
        q_offset_count=np.zeros(3, np.int32),
        q_offset_rank=np.zeros((2, 1), np.int32),
    ),
    "q_offset_and_positions": Malformed(_offset_and_positions, ("q_offset", "q_positions"), "q_offset"),
    **_wrong_positions("q"),
    **_wrong_positions("kv"),
    "kv_end_shape": Malformed(_ends(extra=1), ("kv_end",), "ranges"),
    "kv_end_batch": Malformed(_ends(batch=3), ("kv_end",), "ranges"),
    "kv_end_float": Malformed(_ends(dtype=np.float32), ("kv_end",), "ranges"),
    "kv_start_rank": Malformed(_set(kv_start=np.zeros(3, np.int32)), ("kv_start",), "ranges"),
    **_numbers(
        "chunk_size",
        ("chunk_size",),
        "chunks",
        chunk_size_zero=0,
        chunk_size_negative=-3,
        chunk_size_float=2.5,
        chunk_size_beyond_int32=2**31,
    ),
    **{
        f"alibi_{wrong}": Malformed(
            _set(alibi_slopes=slopes), ("alibi_slopes",), "alibi", values=wrong in _WRONG_VALUES
        )
        for wrong, slopes in _WRONG_SLOPES.items()
    },
    **{
        f"origin_{wrong}": Malformed(
            _set(dropout_prob=0.5, dropout_seed=1, origin=origin), ("origin",), "origin"
        )
        for wrong, origin in _WRONG_ORIGINS.items()
    },
    "dropout_seedless": Malformed(_set(dropout_prob=0.5), ("seed", "rng"), "dropout"),
    "dropout_seed_range": Malformed(_set(dropout_prob=0.5, dropout_seed=2**64), ("seed",), "dropout"),
    "dropout_seed_negative": Malformed(_set(dropout_prob=0.5, dropout_seed=-1), ("seed",), "dropout"),
    **{
        f"dropout_shared_{wrong}": Malformed(
            _set(dropout_prob=0.5, dropout_seed=1, dropout_shared=shared), ("shared",), "shared_dropout"
        )
        for wrong, shared in _WRONG_SHARED.items()
    },
    "dropout_seed_float": Malformed(_set(dropout_prob=0.5, dropout_seed=1.5), ("seed",), "dropout"),
    "segments_one_sided": Malformed(_ids(("q",)), _SEGMENT, "segments"),
    "segments_kv_one_sided": Malformed(_ids(("kv",)), _SEGMENT, "segments"),
    "segments_shape": Malformed(_ids(extra={"q": 1}), _SEGMENT, "segments"),
    "segments_kv_shape": Malformed(_ids(extra={"kv": 1}), _SEGMENT, "segments"),
    "segments_float": Malformed(_ids(dtype=np.float32), _SEGMENT, "segments"),
    **_wrong_lengths("lengths", packed=False),
    "lengths_count": Malformed(_sums(_four, _four, packed=False), _LENGTH, "padded"),
    **_wrong_lengths("packed", packed=True),
    "sinks_shape": Malformed(_set(softmax_aux=np.ones((7, 2), np.float32)), _SINK, "sinks"),
    "sinks_rank": Malformed(_set(softmax_aux=np.ones((1, 2, 1), np.float32)), _SINK, "sinks"),
    "sinks_scalar": Malformed(_set(softmax_aux=np.array(1.0, np.float32)), _SINK, "sinks"),
    "sinks_none": Malformed(_set(softmax_aux=np.ones((2, 0), np.float32)), _SINK, "sinks"),
    "sinks_int": Malformed(_set(softmax_aux=np.ones((2, 1), np.int32)), _SINK, "sinks"),
    # As many sinks as heads: shared by all, or one for each. Ambiguous only for a kernel that supports both.
    "sinks_ambiguous": Malformed(
        _set(softmax_aux=np.ones(2, np.float32)),
        _SINK,
        "sinks",
        lambda subject: subject.limits.sinks == "any",
    ),
}
