"""The Subjects of `jax.experimental.pallas.ops.tpu.flash_attention`: on a TPU, and interpreted on a CPU.

Its documentation is in its source, where `mha_reference` states what the kernel should compute:
https://github.com/jax-ml/jax/blob/main/jax/experimental/pallas/ops/tpu/flash_attention.py. In our words:

- The scale `sm_scale` is 1 unless one is given.
- The bias `ab` has all four axes in full, so the adapter broadcasts it. It is added before the scale.
- Causal order starts in the top-left corner.
- Tokens attend to each other if their segment ids are equal. No id marks padding.
- Lengths are multiples of the blocks, which are 128 by default. Head dims are up to 128, or multiples of it.
- Key heads are as many as query heads. out alone is returned, with gradients of query, key, value and ab.
- The reference multiplies all values by the weights, so a NaN in a hidden one leaks.
- A row that sees no key is not described. Shapes are checked; nothing is said about other arguments.
"""

from dataclasses import replace
from importlib import import_module
from typing import Any

import jax.numpy as jnp

from attest.conformance.peers._interpreter import interpreted
from attest.conformance.subject import Limits, Subject, Tiling
from attest.reference.semantics import Semantics

_BLOCK = 128


def _call(
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    softmax_scale: float = 1.0,
    causal: bool = False,
) -> Any:
    library = import_module("jax.experimental.pallas.ops.tpu.flash_attention")
    batch, q_len, heads, _ = query.shape
    if bias is not None:
        bias = jnp.broadcast_to(bias, (batch, heads, q_len, key.shape[1]))
    segments = None if q_segment_ids is None else library.SegmentIds(q_segment_ids, kv_segment_ids)
    by_heads = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
    out = library.flash_attention(
        *by_heads, ab=bias, segment_ids=segments, causal=causal, sm_scale=softmax_scale
    )
    return out.transpose(0, 2, 1, 3)


TPU = Subject(
    name="jax.pallas.tpu.flash_attention",
    distribution="jax",
    call=_call,
    features=frozenset({"scale", "bias", "causal", "segments"}),
    dtypes=("float32", "bfloat16"),
    semantics=Semantics(
        default_scale="one",
        hidden_nonfinite="leaks",
        bias="before_scale",
        causal="top_left",
        segments="equality",
        empty_rows="unspecified",
        gradients=frozenset({"query", "key", "value", "bias"}),
        lse_gradient=False,
    ),
    backend="tpu",
    head_dims=(1, _BLOCK),
    tilings=(Tiling({}, _BLOCK, _BLOCK),),
    limits=Limits(longest=1 << 20, length_multiple=_BLOCK, validates=False),
)
INTERPRETED = replace(
    TPU,
    name="jax.pallas.tpu.flash_attention.interpreted",
    call=interpreted(_call),
    backend="cpu",
    interpreter="Pallas for TPUs",
    limits=replace(TPU.limits, longest=512),
)

SUBJECTS: tuple[Subject, ...] = ()
APART = (INTERPRETED,)
UNCONFIRMED = (TPU,)
