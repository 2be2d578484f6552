"""The Subjects of `keras.ops.dot_product_attention` on Keras's JAX backend: here, and as on a TPU.

Its documentation is at https://keras.io/api/ops/nn/#dotproductattention-function. In our words:

- key may have fewer heads than query: grouped queries. value has the shape of key.
- A bias is added to the logits. A mask hides the pairs where it is False, and "True indicates the element
  should take part in attention". Both broadcast to (B, N, T, S).
- The scale is 1 / sqrt(H) unless one is given.
- `is_causal` applies a causal mask. Its own code builds the lower triangle from the top-left corner.
- The soft cap is for TPUs alone.
- A row that sees no key is not described, and no refusal of malformed arguments is.

On a TPU, Keras calls JAX's splash attention, unless it raises, as it does for lengths that are no multiples
of 128. A CPU can interpret that kernel, if Keras believes that it is on a TPU.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax

from attest.conformance.cases.features import DTYPES
from attest.conformance.peers._interpreter import interpreted
from attest.conformance.peers._packages import why_not_installed
from attest.conformance.peers.jax_nn import XLA
from attest.conformance.subject import Limits, Subject, Tiling, default_numerics
from attest.reference.semantics import Semantics

_BACKEND = "KERAS_BACKEND"


def _call(
    query: Any,
    key: Any,
    value: Any,
    *,
    attention_mask: Any = None,
    bias: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Any:
    return _library().ops.dot_product_attention(
        query, key, value, bias=bias, mask=attention_mask, scale=softmax_scale, is_causal=causal
    )


def _library() -> Any:
    os.environ.setdefault(_BACKEND, "jax")  # Keras reads it once, when it is imported
    return import_module("keras")


def _call_on_a_pretended_tpu(**arguments: Any) -> Any:
    with _pretended_tpu():
        return _call(**arguments)


@contextmanager
def _pretended_tpu() -> Generator[None]:
    """Let JAX name a TPU as its device, by which Keras chooses the kernel while it is traced."""
    _library()  # what it asks while it is imported, it is told truly
    with mock.patch.object(jax, "devices", return_value=[SimpleNamespace(platform="tpu")]):
        yield


def _why_not_here() -> str | None:
    backend = os.environ.get(_BACKEND, "jax")
    if backend != "jax":
        return f"needs a process with {_BACKEND}=jax, and it is {backend}"
    return why_not_installed("keras")


JAX = Subject(
    name="keras.dot_product_attention",
    distribution="keras",
    call=_call,
    features=frozenset({"scale", "bias", "mask", "broadcast", "causal", "gqa"}),
    dtypes=DTYPES,
    semantics=Semantics(
        hidden_nonfinite="leaks",
        causal="top_left",
        empty_rows="unspecified",
        gradients=frozenset({"query", "key", "value", "bias"}),
        lse_gradient=False,
    ),
    numerics=XLA.numerics,
    limits=Limits(validates=False),
    ready=_why_not_here,
)
# Lengths are those of the kernel: with others, Keras does not call it. Runs contradict the documentation, as
# docs/findings/keras-tpu.md says.
TPU_INTERPRETED = replace(
    JAX,
    name="keras.dot_product_attention.tpu_interpreted",
    call=interpreted(_call_on_a_pretended_tpu),
    dtypes=("float32", "bfloat16"),
    numerics=default_numerics,
    backend="cpu",
    interpreter="Pallas for TPUs",
    head_dims=(1, 128),
    tilings=(Tiling({}, 128, 128),),
    limits=replace(JAX.limits, longest=512, length_multiple=128),
)

SUBJECTS: tuple[Subject, ...] = ()
APART = (JAX,)
UNCONFIRMED = (TPU_INTERPRETED,)
