"""The end of the online softmax: lse and the factor of each row, from its reference and its norm."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attest.kernels.pallas.mosaic_gpu.blocks import ROWS
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile.tile import over_rows

LN2 = math.log(2.0)


def finish(
    spec: KernelSpec, arrays: Mapping[str, Any], head: Any, m: jax.Array, norm: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Return the lse of each row, and the factor of its sums of P V (clauses S10, S11, S13).

    Of partial results: the norm, and None for 1.
    """
    logits = spec.logits
    if spec.results.partial:
        return norm, None
    rescale, largest = jnp.float32(1.0), m
    if logits.sinks:
        together = lax.broadcast(arrays["sinks"][0, head], (ROWS,))
        largest = jnp.maximum(m, together)
        norm = norm * _share(spec, m, largest) + _share(spec, together, largest)
    empty = norm == 0.0
    lse = jnp.where(empty, -jnp.inf, largest * (LN2 * logits.reference_unit) + jnp.log(norm))
    if spec.results.normalize:
        rescale = 1.0 / jnp.where(empty, 1.0, norm)
    elif logits.sinks:
        # The unnormalised out is relative to the largest of all, and `together` is a sum.
        largest = jnp.maximum(m, lax.broadcast(arrays["sinks"][1, head], (ROWS,)))
    return lse, _share(spec, m, largest) * (rescale * spec.kept_scale)


def scaled(spec: KernelSpec, acc: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Return the sums of P V times the factor of their rows; if that is None, times the factor of dropout."""
    if factor is None:
        return acc * spec.kept_scale if spec.dropout else acc
    return acc * over_rows(factor, acc.shape)


def _share(spec: KernelSpec, m: jax.Array, largest: jax.Array) -> jax.Array:
    """Return two to the power of m - largest in bits, at most 1.

    m is a product. The compiler may fuse it with the subtraction, which leaves the rounding of the product.
    Of a row that has seen nothing, and of huge logits, that is more than any exponent.
    """
    return jnp.where(m >= largest, 1.0, jnp.exp2((m - largest) * spec.logits.reference_unit))
