"""The computation and differentiation of a call whose sequence is split over devices."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax

from attest.kernels.call.call import Call
from attest.kernels.contract import Forward
from attest.kernels.differentiate import named
from attest.kernels.numerics.row_terms import cotangent_call, row_terms, sink_cotangent
from attest.kernels.reverse_mode import not_again
from attest.kernels.ring.pairs import Ring
from attest.kernels.ring.passes import backward, forward


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attend(ring: Ring, call: Call) -> tuple[jax.Array, jax.Array]:
    """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] float32 of the rows of this device.

    call: every array varies over the axis, so that gradients of what devices share are summed over it.
    """
    result = forward(ring, ring.read(call))
    return result.out, result.lse


def _with_residuals(ring: Ring, call: Call) -> tuple[tuple[jax.Array, jax.Array], tuple[Call, Forward]]:
    call = not_again(ring.settings.function, call)
    result = named(forward(ring, ring.read(call)))
    return (result.out, result.lse), (call, result)


def _cotangents(
    ring: Ring, residuals: tuple[Call, Forward], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Call]:
    # Behind a barrier, since XLA would otherwise take the keys that forward was sent for those that backward
    # is sent, and keep all of them in memory from one to the other.
    kept = lax.optimization_barrier((residuals, cotangents))
    (call, (out, lse, row_max, _)), (d_out, d_lse) = not_again(ring.settings.function, kept)
    wide, call = call, ring.read(call)
    whole: Any = jax.ShapeDtypeStruct((1, ring.schedule.k_length), call.key.dtype)
    terms = row_terms(
        # How many keys there are limits the norm of a row.
        replace(call, key=whole),
        out=out,
        lse=lse,
        row_max=row_max,
        d_out=d_out.astype(call.query.dtype),
        d_lse=d_lse,
        normalize_output=ring.settings.normalize_output,
        hides=not ring.passes.cleans_rows,
    )
    sums = backward(ring, call, terms)
    return (cotangent_call(wide, **sums, softmax_aux=sink_cotangent(wide, lse, terms.delta)),)


ring_attend.defvjp(_with_residuals, _cotangents)
