"""The TPU forward kernel: out and the statistics of each row, one block of queries at a time.

Online softmax along the last axis of the grid, which runs over the key blocks that some row of the block may
see.

Papers: Milakov and Gimelshein, arXiv 1805.02867 (online softmax); Dao, arXiv 2307.08691.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from attest.kernels.numerics.exponents import LOWEST, lowered
from attest.kernels.pallas.tpu.launch import Step
from attest.kernels.pallas.tpu.tile import Refs, Tile, dot, drop, keep_scale, logits


def forward(tile: Tile, normalize_output: bool, at: Step, refs: Refs) -> None:
    """Compute out [DV, q]; stats [2, q] float32: the lse, and the maximum of visible keys, -inf without any.

    sinks: [2 * heads] float32, the largest sink of every head, then the sum of their exponentials over that
    of the largest.
    """
    m, norm, acc = refs["m"], refs["norm"], refs["acc"]

    @pl.when(at.first)
    def _():
        m[...] = jnp.full(m.shape, LOWEST, jnp.float32)
        norm[...] = jnp.zeros(norm.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(at.visited)
    def _():
        S, _, _ = logits(tile, refs, at)
        m_old = m[...]
        m_new = jnp.maximum(m_old, S.max(axis=0, keepdims=True))
        P = jnp.exp(jnp.minimum(S - lowered(m_new), jnp.float32(0)))
        alpha = jnp.exp(m_old - m_new)
        m[...] = m_new
        norm[...] = norm[...] * alpha + P.sum(axis=0, keepdims=True)
        V = refs["value"][...]
        P_kept = drop(tile, refs, at, P).astype(V.dtype)
        acc[...] = acc[...] * alpha + dot(tile, V, P_kept, (0, 0))

    @pl.when(at.last)
    def _():
        top, total, factor = m[...], norm[...], keep_scale(tile)
        refs["stats"][1:2, :] = jnp.where(total == 0, -jnp.inf, top)
        if "sinks" in refs:
            heads = refs["sinks"].shape[0] // 2
            sink, sinks = refs["sinks"][at.head], refs["sinks"][heads + at.head]
            with_sinks = jnp.maximum(top, sink)
            alpha = jnp.exp(top - with_sinks)
            total = total * alpha + sinks * jnp.exp(sink - with_sinks)
            top, factor = with_sinks, factor * alpha
        empty = total == 0
        total = jnp.where(empty, jnp.float32(1), total)
        refs["stats"][0:1, :] = jnp.where(empty, -jnp.inf, top + jnp.log(total))
        if normalize_output:
            factor = factor / total
        refs["out"][...] = (acc[...] * factor).astype(refs["out"].dtype)
