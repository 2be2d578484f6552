"""The computation and differentiation of a call, which all implementations share around their two passes."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from attest.kernels.call.call import Call
from attest.kernels.contract import Backward, Forward, Passes, Settings
from attest.kernels.numerics.row_terms import cotangent_call, row_terms, sink_cotangent
from attest.kernels.reverse_mode import not_again, reverse_mode_only
from attest.kernels.sharding.automatic import backward, forward, spreads
from attest.kernels.sharding.explicit import on_mesh, on_own_entries, within_mesh
from attest.kernels.varying import vary_together
from attest.kernels.visibility.intervals import array_module, describe_rows, hides_pairs

# What policies of `jax.checkpoint` call the results of the forward pass, by which the backward pass needs it
# no more.
OUT_NAME, LSE_NAME = "flash_attention_out", "flash_attention_lse"


# One jitted entry: an eager call compiles once per signature instead of retracing on every call.
@partial(jax.jit, static_argnums=(0, 1))
def attend(passes: Passes, settings: Settings, call: Call) -> tuple[jax.Array, jax.Array]:
    """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] float32 of a checked call, differentiable once."""

    def run(call: Call) -> tuple[jax.Array, jax.Array]:
        return _differentiable(passes, settings, vary_together(call))

    return on_mesh(run, reverse_mode_only(settings.function, call))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(passes: Passes, settings: Settings, call: Call) -> tuple[jax.Array, jax.Array]:
    result = _forward(passes, settings, _read(call))
    return result.out, result.lse


def _with_residuals(
    passes: Passes, settings: Settings, call: Call
) -> tuple[tuple[jax.Array, jax.Array], tuple[Call, Forward]]:
    call = not_again(settings.function, call)
    result = named(_forward(passes, replace(settings, followed=True), _read(call)))
    return (result.out, result.lse), (call, result)


def named(result: Forward) -> Forward:
    """Return results under the names of policies: lse is saved with all else that the backward pass reads."""
    out, *others = result
    return Forward(
        checkpoint_name(out, OUT_NAME), *jax.tree.map(partial(checkpoint_name, name=LSE_NAME), others)
    )


def _cotangents(
    passes: Passes,
    settings: Settings,
    residuals: tuple[Call, Forward],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[Call]:
    (call, (out, lse, row_max, kept)), (d_out, d_lse) = not_again(settings.function, (residuals, cotangents))
    d_out = d_out.astype(call.query.dtype)  # float32 where out is unrounded
    wide, call = call, _read(call)
    given = {"out": out, "lse": lse, "row_max": row_max, "d_out": d_out, "d_lse": d_lse}
    if passes.partitioned and spreads():

        def run(call: Call, given: dict[str, jax.Array], unrounded: bool) -> dict[str, jax.Array]:
            unrounded = unrounded or settings.unrounded
            return _backward(passes, replace(settings, unrounded=unrounded), call, given)

        return (cotangent_call(wide, **backward(run, call, given)),)
    if wide.key.dtype != call.key.dtype or wide.value.dtype != call.value.dtype:
        settings = replace(settings, unrounded=True)
    compute = partial(_backward, passes, settings)
    found = on_own_entries(compute, call, given, kept) if within_mesh() else compute(call, given, kept)
    return (cotangent_call(wide, **found),)


def _read(call: Call) -> Call:
    """Return the call as passes read it: key and value in the dtype of query; see `sharding.explicit`."""
    key, value = (x.astype(call.query.dtype) for x in (call.key, call.value))
    return replace(call, key=key, value=value)


_differentiable.defvjp(_with_residuals, _cotangents)


def _backward(
    passes: Passes, settings: Settings, call: Call, given: dict[str, jax.Array], kept: Any = None
) -> dict[str, jax.Array]:
    """Return the gradients of the float arrays of a call, by name; given: as `partitioned.backward` says."""
    hides = hides_pairs(call) and not passes.cleans_rows
    terms = row_terms(call, **given, normalize_output=settings.normalize_output, hides=hides)
    sums = passes.backward(settings, call, terms, kept) if _has_pairs(call) else _without_pairs(call)
    # What a launch returns need not say over which axes it varies.
    _, sums = vary_together((call, sums))
    found = {**sums._asdict(), "softmax_aux": sink_cotangent(call, given["lse"], terms.delta)}
    return {name: x for name, x in found.items() if x is not None}


def _forward(passes: Passes, settings: Settings, call: Call) -> Forward:
    if passes.partitioned and spreads():
        return forward(partial(_alone, passes, settings), call)
    run = partial(_alone, passes, settings)
    return on_own_entries(run, call) if within_mesh() else run(call)


def _alone(passes: Passes, settings: Settings, call: Call) -> Forward:
    """Run the forward pass on one device."""
    result = passes.forward(settings, call) if _has_pairs(call) else _sinks_alone(settings, call)
    _, result = vary_together((call, result))
    if call.softmax_aux is None:
        return result
    # Padding has no sinks (S9); an empty row, which otherwise looks like it, has (S11).
    padding = describe_rows(call, xp=array_module(call)).padding
    if padding is None:
        return result
    return result._replace(lse=jnp.where(padding[:, None, :], -jnp.inf, result.lse))


def _has_pairs(call: Call) -> bool:
    return 0 not in (*call.query.shape[:2], call.key.shape[1])


def _sinks_alone(settings: Settings, call: Call) -> Forward:
    """Run the forward pass of a call without queries or keys: out 0, the lse of the sinks (S10, S11)."""
    batch, q_length, q_heads, _ = call.query.shape
    dtype = settings.result_dtype(call.query.dtype)
    out = jnp.zeros((batch, q_length, q_heads, call.value.shape[3]), dtype)
    nothing = jnp.full((batch, q_heads, q_length), -jnp.inf, jnp.float32)
    if call.softmax_aux is None:
        return Forward(out, nothing, nothing)
    lse = jax.nn.logsumexp(call.softmax_aux.astype(jnp.float32), axis=-1)[None, :, None]
    return Forward(out, jnp.broadcast_to(lse, nothing.shape), nothing)


def _without_pairs(call: Call) -> Backward:
    bias = None if call.bias is None else jnp.zeros_like(call.bias)
    return Backward(jnp.zeros_like(call.query), jnp.zeros_like(call.key), jnp.zeros_like(call.value), bias)
