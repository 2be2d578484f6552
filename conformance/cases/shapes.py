"""The shapes and dtypes of a Case's arrays, so that a call of any size can be traced."""

from typing import Any

import jax
import numpy as np

from attest.conformance.cases.build import (
    DTYPES,
    alibi_shape,
    pairs_shape,
    position_shapes,
    range_shapes,
    sinks_shape,
)
from attest.conformance.cases.case import Case

Shape = jax.ShapeDtypeStruct

# Any seed: what is compiled takes it as an array.
_SEED = 1


def shapes_of(case: Case) -> tuple[dict[str, Shape], dict[str, Any]]:
    """Return the arrays and the static options that `execute.call_of` finds in the case once built."""
    dtype = np.dtype(DTYPES[case.dtype])
    pairs = (case.q_len, case.kv_len)
    arrays = {
        "query": Shape((case.batch, case.q_len, case.q_heads, case.head_dim), dtype),
        "key": Shape((case.batch, case.kv_len, case.kv_heads, case.head_dim), dtype),
        "value": Shape((case.batch, case.kv_len, case.kv_heads, case.value_width), dtype),
    }
    if case.mask is not None:
        mask_dtype = np.dtype(np.int32 if case.integer_mask else np.bool_)
        arrays["attention_mask"] = Shape(pairs_shape(case, case.mask), mask_dtype)
    if case.bias is not None:
        arrays["bias"] = Shape(pairs_shape(case, case.bias), dtype)
    if case.lengths is not None:
        for name in ("cum_seqlens_q", "cum_seqlens_k"):
            arrays[name] = Shape((len(case.lengths) + 1,), np.dtype(np.int32))
    if case.sinks:
        arrays["softmax_aux"] = Shape(sinks_shape(case), dtype)
    if case.segments is not None:
        for name, length in zip(("q_segment_ids", "kv_segment_ids"), pairs, strict=True):
            arrays[name] = Shape((case.batch, length), np.dtype(np.int32))
    for name, shape in (position_shapes(case) | range_shapes(case)).items():
        arrays[name] = Shape(shape, np.dtype(np.int32))
    if case.alibi is not None:
        arrays["alibi_slopes"] = Shape(alibi_shape(case), np.dtype(np.float32))
    if isinstance(case.q_offset, tuple):
        arrays["q_offset"] = Shape((len(case.q_offset),), np.dtype(np.int32))
    options = {
        "softmax_scale": case.scale,
        "dropout_prob": case.dropout or None,
        "dropout_seed": _SEED if case.dropout else None,
        "dropout_shared": case.dropout_shared,
        "causal": case.causal or None,
        "sliding_window": case.window,
        "logits_soft_cap": case.soft_cap,
        "normalize_output": None if case.normalized else False,
        "q_offset": None if isinstance(case.q_offset, tuple) else case.q_offset,
        "origin": case.origin if any(case.origin or ()) else None,
        "chunk_size": case.chunk_size,
    }
    return arrays, {name: value for name, value in options.items() if value is not None}
