"""The Subject of `flash_attn_jax.flash_mha`: FlashAttention 2 on NVIDIA GPUs.

Its documentation is at https://github.com/nshepperd/flash_attn_jax, and refers to that of FlashAttention at
https://github.com/Dao-AILab/flash-attention. In our words:

- Inputs are float16 or bfloat16, with head dims up to 256. Queries may be grouped.
- The scale is 1 / sqrt(d) unless one is given.
- "The causal mask is aligned to the bottom right corner", and so is the window, which includes both ends. -1
  leaves a side open.
- "If the row of the mask is all zero, the output will be zero."
- The backward pass adds in any order: it is not deterministic.
- out alone is returned, with gradients of query, key and value. No refusal of malformed calls is described.

Version 0.6.2 needs a version of JAX below 0.9.
"""

from importlib import import_module
from typing import Any

from attest.conformance.peers._packages import why_not_installed
from attest.conformance.peers._windows import Window, sides_of
from attest.conformance.subject import Limits, Subject
from attest.reference.semantics import Semantics


def _call(
    query: Any,
    key: Any,
    value: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    sliding_window: Window = None,
) -> Any:
    window = tuple(-1 if side is None else side for side in sides_of(sliding_window))
    return import_module("flash_attn_jax").flash_mha(
        query, key, value, softmax_scale=softmax_scale, is_causal=causal, window_size=window
    )


MHA = Subject(
    name="flash_attn_jax.flash_mha",
    distribution="flash-attn-jax",
    call=_call,
    features=frozenset({"scale", "causal", "window", "gqa"}),
    dtypes=("bfloat16", "float16"),
    semantics=Semantics(
        gradients=frozenset({"query", "key", "value"}), lse_gradient=False, deterministic=False
    ),
    backend="gpu",
    limits=Limits(longest=1 << 20, validates=False),
    ready=lambda: why_not_installed("flash_attn_jax"),
)

SUBJECTS: tuple[Subject, ...] = ()
UNCONFIRMED = (MHA,)
