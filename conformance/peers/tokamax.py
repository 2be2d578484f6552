"""The Subjects of `tokamax.dot_product_attention`: in XLA, and on GPUs in Pallas Triton and Mosaic GPU.

Its documentation is in its source, and refers to that of `jax.nn.dot_product_attention`:
https://github.com/openxla/tokamax/blob/main/tokamax/_src/ops/attention/api.py. In our words:

- Values may have a width of their own. Queries may be grouped. Arrays may have additional batch dimensions,
  but nothing is said of their bits (S27), so they are not declared.
- A bias is added to the scaled logits, before `logits_soft_cap` caps them.
- "Attention weights are masked out" where a mask is False: the product with the values takes all of them, so
  a NaN in a hidden one leaks. Masks and biases broadcast to [batch, num_heads, seq_len_q, seq_len_kv].
- A window is (left, right) around the token. Causal order and window start in the top-left corner, as
  `CausalMask` is drawn.
- `xla_chunked` computes in chunks of 512 queries and 1024 keys. On GPUs heuristics choose the block sizes:
  Triton's steps have 64 keys, Mosaic's 64 or 128.
- Triton multiplies the queries by the scale in their own dtype. Its backward pass refuses `logits_soft_cap`,
  which is therefore not judged: every call is differentiated.
- Neither a row that sees no key, nor the rows beyond a length, nor any refusal of malformed arguments, is
  described.
"""

import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any

from attest.conformance.cases.features import DTYPES
from attest.conformance.peers._packages import why_not_installed
from attest.conformance.peers._windows import Window, with_ended_sides
from attest.conformance.peers.jax_nn import as_xla_multiplies, on_matrix_units
from attest.conformance.subject import Limits, Subject, Tiling, default_numerics
from attest.reference.numerics import Numerics, format_of
from attest.reference.semantics import Semantics

_PROFILER = "xprof.cli.tools"
_IMPORTING = Lock()  # threads that compile import it at once


def _call(
    query: Any,
    key: Any,
    value: Any,
    *,
    implementation: str,
    bias: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    logits_soft_cap: float | None = None,
    mask: Any = None,
    local_window_size: Any = None,
) -> Any:
    return _library().dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        scale=softmax_scale,
        is_causal=causal,
        logits_soft_cap=logits_soft_cap,
        mask=mask,
        local_window_size=local_window_size,
        implementation=implementation,
    )


def _call_with_masks(
    query: Any,
    key: Any,
    value: Any,
    *,
    attention_mask: Any = None,
    sliding_window: Window = None,
    **options: Any,
) -> Any:
    window = with_ended_sides(sliding_window, query, key)
    return _call(query, key, value, mask=attention_mask, local_window_size=window, **options)


def _library() -> Any:
    """Import tokamax without the profiler that its own benchmarks use, where that one is not installed."""
    with _IMPORTING:
        if "xprof" not in sys.modules and find_spec("xprof") is None:
            names = _PROFILER.split(".")
            for end in range(1, len(names) + 1):
                name = ".".join(names[:end])
                sys.modules[name] = ModuleType(name)
            vars(sys.modules[_PROFILER])["get_kernel_stats_tool"] = None
        return import_module("tokamax")


def _subject(implementation: str) -> Subject:
    """Return what the Subjects of all implementations have in common, which is what is documented."""
    return Subject(
        name=f"tokamax.{implementation}",
        distribution="tokamax",
        call=partial(_call, implementation=implementation),
        features=frozenset({"scale", "bias", "causal", "soft_cap", "gqa", "value_dim"}),
        dtypes=("bfloat16", "float16"),
        semantics=Semantics(
            hidden_nonfinite="leaks",
            causal="top_left",
            empty_rows="unspecified",
            gradients=frozenset({"query", "key", "value", "bias"}),
            lse_gradient=False,
        ),
        limits=Limits(validates=False),
        ready=lambda: why_not_installed("tokamax"),
    )


def _numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return the arithmetic of XLA: dots take 16-bit operands, weights are kept, all else is float32.

    In chunks, weights are divided by their sum at the end, and derivatives follow from those of that step.
    """
    cast = format_of(dtype).unit
    whole = tiling.key_block is None
    usual = as_xla_multiplies(default_numerics(dtype, tiling), dtype)
    return replace(usual, d_weights=cast, materialised=whole, rounded_out_in_delta=False)


def _xla_subject(implementation: str, *blocks: int) -> Subject:
    features = frozenset({"mask", "broadcast", "window"})
    common = _subject(implementation)
    return replace(
        common,
        call=partial(_call_with_masks, implementation=implementation),
        features=common.features | features,
        dtypes=DTYPES,
        semantics=replace(common.semantics, window="top_left"),
        numerics=_numerics,
        tilings=(Tiling({}, *blocks),),
    )


def _gpu_numerics(dtype: str, tiling: Tiling) -> Numerics:
    return on_matrix_units(default_numerics(dtype, tiling), dtype)


def _triton_numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return its arithmetic: queries are scaled before the product, in their own dtype."""
    return replace(_gpu_numerics(dtype, tiling), input_rounding=format_of(dtype).unit)


def _gpu_subject(implementation: str, **declared: Any) -> Subject:
    common = _subject(implementation)
    return replace(common, backend="gpu", limits=replace(common.limits, longest=1 << 20), **declared)


XLA = _xla_subject("xla")
XLA_CHUNKED = _xla_subject("xla_chunked", 512, 1024)
TRITON = _gpu_subject(
    "triton",
    features=XLA.features - {"mask", "broadcast", "window", "soft_cap"},
    unjudged=frozenset({"soft_cap"}),
    numerics=_triton_numerics,
    tilings=(Tiling({}, 64, 64),),
)
MOSAIC = _gpu_subject("mosaic", numerics=_gpu_numerics, tilings=(Tiling({}, 128, 64),))

SUBJECTS: tuple[Subject, ...] = ()
APART = (XLA, XLA_CHUNKED)
UNCONFIRMED = (TRITON, MOSAIC)
