"""Kernels that are plain Python over NumPy arrays, as functions that JAX can compile and differentiate."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.conformance.mutants.kernels.arguments import Options, arguments

Arrays = Mapping[str, Any]
DIFFERENTIATED = ("query", "key", "value", "bias", "softmax_aux")


@dataclass(frozen=True)
class Passes:
    """A kernel in NumPy.

    forward: from options and arrays to out [B, Sq, Hq, Dv] and lse [B, Hq, Sq]. gradients: from options,
    arrays and the cotangents of both to the gradients by name. Both are functions of their arguments alone.
    """

    forward: Callable[[Options, Arrays], tuple[Any, Any]]
    gradients: Callable[[Options, Arrays, Any, Any], Arrays]


def call_back(passes: Passes, query: Any, key: Any, value: Any, **options: Any) -> tuple[Any, Any]:
    """Return (out, lse) for the arguments of docs/reference/semantics.md, or raise ValueError."""
    static, arrays = arguments(query, key, value, **options)
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    varied = {name: arrays.pop(name) for name in DIFFERENTIATED if name in arrays}
    return _attend((passes, static), varied, arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(chosen: tuple[Passes, Options], varied: Arrays, fixed: Arrays) -> tuple[Any, Any]:
    return _forward(chosen, varied, fixed)


@partial(jax.jit, static_argnums=0)
def _forward(chosen: tuple[Passes, Options], varied: Arrays, fixed: Arrays) -> tuple[Any, Any]:
    passes, options = chosen
    query, value = varied["query"], varied["value"]
    batch, q_len, heads, _ = query.shape
    shapes = (
        jax.ShapeDtypeStruct((batch, q_len, heads, value.shape[3]), query.dtype),
        jax.ShapeDtypeStruct((batch, heads, q_len), jnp.float32),
    )

    def run(varied: Arrays, fixed: Arrays) -> tuple[Any, Any]:
        with np.errstate(all="ignore"):
            return passes.forward(options, _held(varied) | _held(fixed))

    return jax.pure_callback(run, shapes, varied, fixed, vmap_method="sequential")


def _attend_forward(chosen: tuple[Passes, Options], varied: Arrays, fixed: Arrays) -> tuple[Any, Any]:
    return _forward(chosen, varied, fixed), (varied, fixed)


def _attend_backward(chosen: tuple[Passes, Options], kept: Any, cotangents: Any) -> tuple[Any, None]:
    return _gradients(chosen, *kept, *cotangents), None


@partial(jax.jit, static_argnums=0)
def _gradients(
    chosen: tuple[Passes, Options], varied: Arrays, fixed: Arrays, d_out: Any, d_lse: Any
) -> Arrays:
    passes, options = chosen
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in varied.items()}

    def run(varied: Arrays, fixed: Arrays, d_out: Any, d_lse: Any) -> Arrays:
        with np.errstate(all="ignore"):
            held = _held(varied) | _held(fixed)
            found = passes.gradients(options, held, np.asarray(d_out), np.asarray(d_lse))
            return {name: found[name].astype(held[name].dtype) for name in varied}

    return jax.pure_callback(run, shapes, varied, fixed, d_out, d_lse, vmap_method="sequential")


def _held(arrays: Arrays) -> dict[str, Any]:
    return {name: np.asarray(array) for name, array in arrays.items()}


_attend.defvjp(_attend_forward, _attend_backward)
