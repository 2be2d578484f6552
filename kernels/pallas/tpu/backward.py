"""The TPU backward kernels: they recompute P from lse and sum dquery, dkey, dvalue and dbias.

Three kernels, so that every sum has one owner and runs in one order (clause S17): `backward_query` owns a
block of queries, `backward_key` a block of keys of a key head and all the query heads that share it,
`backward_bias` a tile of the bias and all that is broadcast over it.

The lines of `terms` are those of `attest.kernels.numerics.row_terms.RowTerms`: lse, delta, and weight if
there are three.

Paper: Dao, arXiv 2307.08691.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attest.kernels.pallas.tpu.launch import Step
from attest.kernels.pallas.tpu.tile import Refs, Tile, dot, drop, hide, keep_scale, logits


def backward_query(tile: Tile, at: Step, refs: Refs) -> None:
    """Compute d_query [D, q]."""
    total = refs["total"]
    _start(at, total)

    @pl.when(at.visited)
    def _():
        K = refs["key"][...]
        _, dS = _cotangents(tile, at, refs)
        total[...] += dot(tile, K, dS.astype(K.dtype), (0, 0))

    @pl.when(at.last)
    def _():
        refs["d_query"][...] = (total[...] * jnp.float32(tile.scale)).astype(refs["d_query"].dtype)


def backward_key(tile: Tile, at: Step, refs: Refs) -> None:
    """Compute d_key [k, D], d_value [k, DV]."""
    of_key, of_value = refs["of_key"], refs["of_value"]
    _start(at, of_key)
    _start(at, of_value)

    @pl.when(at.visited)
    def _():
        Q, dO = refs["query"][...], refs["d_out"][...]
        P, dS = _cotangents(tile, at, refs)
        of_value[...] += dot(tile, P.astype(dO.dtype), dO, (1, 1))
        of_key[...] += dot(tile, dS.astype(Q.dtype), Q, (1, 1))

    @pl.when(at.last)
    def _():
        refs["d_key"][...] = (of_key[...] * jnp.float32(tile.scale)).astype(refs["d_key"].dtype)
        refs["d_value"][...] = of_value[...].astype(refs["d_value"].dtype)


def backward_bias(tile: Tile, at: Step, refs: Refs) -> None:
    """Compute d_bias [q or 1, k]; with one row for all, that of their sum."""
    total = refs["total"]
    _start(at, total)

    @pl.when(at.visited)
    def _():
        _, dS = _cotangents(tile, at, refs)
        total[...] += dS

    @pl.when(at.last)
    def _():
        d_bias = total[...].T
        if refs["d_bias"].shape[0] == 1:
            d_bias = d_bias.sum(axis=0, keepdims=True)
        refs["d_bias"][...] = d_bias.astype(refs["d_bias"].dtype)


def _start(at: Step, total: jax.Array) -> None:
    @pl.when(at.first)
    def _():
        total[...] = jnp.zeros(total.shape, jnp.float32)


def _cotangents(tile: Tile, at: Step, refs: Refs) -> tuple[jax.Array, jax.Array]:
    """Return the factor of d_out in d_value, and dS = P * (weight * dP - delta), through the cap (S3, S14).

    Both [k, q] float32. A row whose lse is NaN must not reach keys that it does not see, hence P is hidden.
    """
    terms, dropped = refs["terms"], "seed" in refs
    S, visible, slope = logits(tile, refs, at)
    P = hide(visible, jnp.exp(jnp.minimum(S - terms[0:1, :], jnp.float32(0))))
    dP = dot(tile, refs["value"][...], refs["d_out"][...], (1, 0))
    weight = None if terms.shape[0] == 2 else terms[2:3, :]
    if dropped:
        weight = keep_scale(tile) if weight is None else weight * keep_scale(tile)
    weights = P
    if weight is not None:
        weights = drop(tile, refs, at, P * weight)
        dS = weights * dP - P * terms[1:2, :]
    else:
        dS = P * (dP - terms[1:2, :])
    return weights, hide(visible, dS if slope is None else dS * slope)
