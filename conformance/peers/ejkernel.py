"""Subjects of ejKernel: its Triton flash attention here, and all kernels in an environment of their own.

ejKernel 0.0.80.3 needs jax below 0.11. ATTEST_PEER_PYTHON_EJKERNEL names the interpreter of an environment
that has it, such as /path/venv/bin/python. Its documentation are the docstrings of the functions, at
https://github.com/erfanzar/ejkernel, in `ejkernel/kernels/_xla/{flash_attention,attention,ring_attention}`.
In our words:

- Logits are computed in float32, whatever the dtype of the inputs, by the flash and the ring attention; by
  `attention` in a dtype that the caller chooses.
- A mask hides the pairs where it is False or 0. `attention` ignores it beside a bias.
- With `causal`, a query attends to the keys at its own and earlier positions; with a window (left, right), to
  those within it. Positions are those in the arrays, so both start in the top-left corner.
- Segment ids below 0 are padding.
- Sinks enter the normaliser; they have no value.
- A cap is applied to the logits before the bias by `attention` and the ring, after it by the flash attention.
- Ring attention is documented to work on one device, with `axis_name` None.

Not documented, and declared as it is:

- The flash attention replaces hidden logits by the lowest float32 number.
- A bias of -inf hides a key, except from the flash attention with a cap, which makes it finite.
- NaN in a hidden value leaks. A row that sees no key is not judged, and neither are refusals.
- Sinks of each head are documented in two axes, which the types of the arguments refuse.
- Ring attention takes as many key heads as query heads.
- The flash attention rounds the products of queries and keys to the inputs' dtype, against its documentation.

`attention` is not declared for float16: it rounds logits once more after the bias, for which `Numerics` has
no field, and which only float16 shows.
"""

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from attest.conformance.cases.features import DTYPES
from attest.conformance.peers._environments import ATTEST, Environment
from attest.conformance.subject import Limits, Subject, Tiling, default_numerics
from attest.reference.numerics import Numerics, format_of
from attest.reference.semantics import Semantics

_THERE = Environment("ATTEST_PEER_PYTHON_EJKERNEL", "ejkernel 0.0.80.3")


def _call_triton(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Call it: its options have our names."""
    library = import_module("ejkernel.kernels._triton.flash_attention")
    return library.flash_attention(query, key, value, **options)


def _why_not_here() -> str | None:
    return None if find_spec("ejkernel") else "needs the package ejkernel, which is not installed"


def _flash_numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return its arithmetic: the products of queries and keys are rounded to the inputs' dtype."""
    rounding = 0.0 if dtype == "float32" else format_of(dtype).unit
    return replace(default_numerics(dtype, tiling), logits=rounding)


def _attention_numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return its arithmetic: everything but the softmax is computed and stored in the inputs' dtype.

    So queries are rounded after the scale, logits after the cap and again after the bias.
    """
    contract = replace(default_numerics(dtype, tiling), materialised=True)
    if dtype == "float32":
        return contract
    unit = format_of(dtype).unit
    return replace(contract, input_rounding=unit, logits=2 * unit, tanh=2 * unit, d_weights=unit)


_QKV = frozenset({"query", "key", "value"})
_DIALECT = Semantics(
    causal="top_left",
    window="top_left",
    hidden_nonfinite="leaks",
    empty_rows="unspecified",
    gradients=_QKV,
    lse_gradient=False,
)
_COMMON = frozenset({"scale", "bias", "soft_cap", "causal", "window", "sinks"})


def _blocks(q_block: int, kv_block: int) -> Tiling:
    return Tiling({"q_block": q_block, "kv_block": kv_block}, q_block, kv_block)


TRITON = Subject(
    name="ejkernel.triton",
    distribution="ejkernel",
    call=_call_triton,
    features=frozenset({"scale", "causal", "gqa"}),
    dtypes=("bfloat16", "float16"),
    semantics=Semantics(gradients=_QKV, lse_gradient=False),
    backend="gpu",
    limits=Limits(longest=1 << 20),
    ready=_why_not_here,
)

# The same kernels without a GPU, in blocks of 16: without a choice, ejKernel takes as many queries as there
# are, which Triton refuses unless that is a power of two.
INTERPRETED = _THERE.subject(
    "ejkernel.triton.interpreted",
    "ejkernel_triton.py:flash",
    {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ATTEST)},
    features=TRITON.features,
    dtypes=TRITON.dtypes,
    semantics=replace(TRITON.semantics, hidden_nonfinite="leaks", empty_rows="unspecified"),
    tilings=(_blocks(16, 16), _blocks(32, 64)),
    head_dims=(16, 128),
    limits=Limits(longest=256, validates=False),
    gradient_dtype="float32",
    interpreter="Triton",
)

FLASH = _THERE.subject(
    "ejkernel.xla.flash_attention",
    "ejkernel_calls.py:flash",
    features=_COMMON | {"gqa", "mask", "integer_mask", "broadcast", "segments", "dropout", "unnormalized"},
    dtypes=DTYPES,
    semantics=replace(
        _DIALECT,
        hidden="sentinel",
        sentinel=float(np.finfo(np.float32).min),
        dropout="own_generator",
        row_max_gradient="differentiated",
    ),
    numerics=_flash_numerics,
    tilings=(_blocks(16, 16), _blocks(128, 128)),
    limits=Limits(excludes=(frozenset({"bias", "soft_cap"}),), sinks="shared", seed_bits=31, validates=False),
)

ATTENTION = _THERE.subject(
    "ejkernel.xla.attention",
    "ejkernel_calls.py:attention",
    features=_COMMON | {"gqa", "mask", "broadcast", "dropout", "value_dim"},
    dtypes=("float32", "bfloat16"),
    semantics=replace(
        _DIALECT,
        bias="after_cap",
        precedence="bias_over_mask",
        dropout="own_generator",
        gradients=_QKV | {"bias", "softmax_aux"},
    ),
    numerics=_attention_numerics,
    limits=Limits(sinks="shared", seed_bits=31, validates=False),
)

RING = _THERE.subject(
    "ejkernel.xla.ring_attention",
    "ejkernel_calls.py:ring",
    features=_COMMON | {"segments", "positions"},
    dtypes=DTYPES,
    semantics=replace(_DIALECT, bias="after_cap"),
    tilings=(_blocks(16, 16), _blocks(512, 512)),
    limits=Limits(sinks="shared", validates=False),
)

SUBJECTS: tuple[Subject, ...] = ()
APART = (INTERPRETED, RING)
# Some gradients of FLASH and ATTENTION are outside the error model, and the cause is not known.
UNCONFIRMED = (TRITON, FLASH, ATTENTION)
