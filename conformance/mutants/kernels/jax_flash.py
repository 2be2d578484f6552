"""Flash attention in pure JAX, with the gradients written by hand, as an outsider would write it.

A program computes one tile; it walks over the blocks of keys that its rows may see. As in FlashAttention, the
products add in float32, and the weights and their cotangents are cast to the inputs' dtype before they are
multiplied.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from attest.conformance.mutants.kernels.arguments import Options, arguments
from attest.conformance.mutants.kernels.jax_backward import backward
from attest.conformance.mutants.kernels.jax_forward import forward
from attest.conformance.mutants.kernels.jax_tiles import DIFFERENTIATED, Arrays, prepare
from attest.conformance.mutants.kernels.variants import Variant


def flash_attention(variant: Variant, query: Any, key: Any, value: Any, **options: Any) -> tuple[Any, Any]:
    """Return (out, lse) for the arguments of docs/reference/semantics.md, or raise ValueError."""
    static, arrays = arguments(query, key, value, **options)
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    varied = {name: arrays.pop(name) for name in DIFFERENTIATED if name in arrays}
    return _attend((variant, static), varied, arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(chosen: tuple[Variant, Options], varied: Arrays, fixed: Arrays) -> tuple[Any, Any]:
    return _run(chosen, varied, fixed)[0]


@partial(jax.jit, static_argnums=0)
def _run(chosen: tuple[Variant, Options], varied: Arrays, fixed: Arrays) -> tuple[Any, Any]:
    saved = forward(prepare(*chosen, varied | fixed))
    return results(saved, varied), saved


def _attend_forward(chosen: tuple[Variant, Options], varied: Arrays, fixed: Arrays) -> tuple[Any, Any]:
    result, saved = _run(chosen, varied, fixed)
    return result, (varied, fixed, saved)


def _attend_backward(
    chosen: tuple[Variant, Options], kept: Any, cotangents: tuple[Any, Any]
) -> tuple[Any, None]:
    return _gradients(chosen, *kept, *cotangents), None


@partial(jax.jit, static_argnums=0)
def _gradients(
    chosen: tuple[Variant, Options], varied: Arrays, fixed: Arrays, saved: Any, d_out: Any, d_lse: Any
) -> Arrays:
    return gradients_of(backward(prepare(*chosen, varied | fixed), saved, d_out, d_lse), varied)


_attend.defvjp(_attend_forward, _attend_backward)


def results(saved: tuple[Any, ...], arrays: Arrays) -> tuple[Any, Any]:
    """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] without the padding of the last tiles."""
    q_len = arrays["query"].shape[1]
    return saved[0].transpose(0, 2, 1, 3)[:, :q_len], saved[1][..., :q_len]


def gradients_of(found: Arrays, arrays: Arrays) -> Arrays:
    """Return the gradients in the shape and dtype of their arrays."""
    for name in DIFFERENTIATED[:3]:
        found[name] = found[name].transpose(0, 2, 1, 3)
    return {name: _cut(found[name], arrays[name]) for name in found}


def _cut(gradient: Any, array: Any) -> Any:
    return gradient[tuple(slice(length) for length in array.shape)].astype(array.dtype)
