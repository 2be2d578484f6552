"""Flash attention in plain JAX: key chunks, online softmax and recomputation, in O(length) memory.

The papers' symbols: S = scaled logits, P = probabilities, O = output, L = lse, dS and dP their cotangents,
Delta = rowsum(dO * O). Chunks: the outer loop walks (batch entry, query chunk), the inner one the key chunks
that some row of the query chunk may see; the logits of a tile are [key heads, group, chunk q, chunk k], so
the query heads of a group share their key head without repeating it.

Papers: Milakov and Gimelshein, arXiv 1805.02867 (online softmax); Rabe and Staats, arXiv 2112.05682 (chunks
in JAX); Dao, arXiv 2307.08691 (backward by recomputation from L and Delta).
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attest.kernels.call.call import Call
from attest.kernels.call.options import refuse, shown
from attest.kernels.call.symbolic import is_symbolic
from attest.kernels.contract import Backward, Forward, Passes, Settings, check_blocks
from attest.kernels.numerics.row_terms import RowTerms
from attest.kernels.varying import vary_together
from attest.kernels.xla import pieces, whole
from attest.kernels.xla.blocks import ChunkSizes
from attest.kernels.xla.products import products_of
from attest.kernels.xla.table import with_choice
from attest.kernels.xla.tiles import (
    Grid,
    RowChunks,
    any_nonfinite,
    cut,
    cut_rows,
    grouped_sinks,
    key_chunk,
    pairwise_inputs,
    scaled_products,
    select,
    tile_dropout,
    tile_logits,
)


def _forward(settings: Settings, call: Call) -> Forward:
    settings = with_choice(settings, call)
    small = _is_small(settings, call)
    keeps = small and not settings.unrounded

    def on_cpu() -> Forward:
        if not small:
            return _forward_by_tiles(settings, call)
        products = products_of(call, settings.precision, wide=True)
        return whole.forward(settings, call, products, whole.rows_of(call), keeps=keeps)

    return _by_platform(
        settings.forward, call, small, on_cpu, lambda: pieces.forward(settings, call, keeps=keeps)
    )


def _backward(settings: Settings, call: Call, terms: RowTerms, kept: Any) -> Backward:
    settings = with_choice(settings, call)
    small = _is_small(settings, call)

    def on_cpu() -> Backward:
        if not small:
            return _backward_by_tiles(settings, call, terms)
        products = products_of(call, settings.precision, wide=True)
        return whole.backward(settings, call, products, whole.rows_of(call), terms, kept)

    def rounded(found: Backward) -> Backward:
        """Round alike on all platforms; sums over a part of the keys stay float32."""
        dtype = settings.result_dtype(call.query.dtype)
        return Backward(
            found.query.astype(dtype), found.key.astype(dtype), found.value.astype(dtype), found.bias
        )

    return _by_platform(
        settings.backward,
        call,
        small,
        lambda: rounded(on_cpu()),
        lambda: rounded(pieces.backward(settings, call, terms, kept)),
    )


def _by_platform[T](
    sizes: ChunkSizes | None, call: Call, small: bool, on_cpu: Callable[[], T], elsewhere: Callable[[], T]
) -> T:
    """Return a pass as the platform for which the program is lowered computes it.

    Sizes that are given are those of tiles, on every platform. So it is with symbolic sizes, of which no
    number of pieces is known, and where the two ways have the same arithmetic on one piece.
    """
    if sizes is not None or is_symbolic(call) or (small and call.query.dtype == jnp.float32):
        return on_cpu()
    return lax.platform_dependent(cpu=on_cpu, default=elsewhere)


def _forward_by_tiles(settings: Settings, call: Call) -> Forward:
    chunks = settings.forward or ChunkSizes()
    grid = cut(call, chunks.q, chunks.k)
    pairs = pairwise_inputs(call, grid)
    keys, values = grid.split_keys(call.key), grid.split_keys(call.value)
    non_finite = any_nonfinite(values)
    sinks = grouped_sinks(call)
    dot = partial(jnp.einsum, precision=settings.precision)
    lanes = (grid.k_heads, grid.group, grid.q)

    def row_chunk(args: tuple[jax.Array, jax.Array, RowChunks]) -> tuple[jax.Array, jax.Array, jax.Array]:
        step, Q, row = args

        def key_tile(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
            m, norm, acc = carry
            K, V = (select(x, key_chunk(grid, step, j)) for x in (keys, values))
            products = scaled_products(dot, "hgqd,hkd->hgqk", call, Q, K)
            S, _, _ = tile_logits(call, grid, pairs, row, step, j, products, settings.logits_dtype)
            m_new = jnp.maximum(m, S.max(axis=-1))
            shift = _finite_or_zero(m_new)
            P = jnp.exp(S - shift[..., None])
            alpha = jnp.exp(m - shift)
            norm = alpha * norm + P.sum(axis=-1)
            P_kept = tile_dropout(call, grid, pairs, step, j, P)
            acc = alpha[..., None] * acc + dot("hgqk,hkd->hgqd", P_kept, _zero_non_finite(V))

            # A hidden value must not leak as 0 * NaN, so non-finite values are left out above. Should there
            # be any, the rows that give them weight become NaN here.
            def propagate_nonfinite(acc: jax.Array) -> jax.Array:
                seen = (P_kept > 0).astype(jnp.float32), (~jnp.isfinite(V)).astype(jnp.float32)
                return jnp.where(dot("hgqk,hkd->hgqd", *seen) > 0, jnp.float32(jnp.nan), acc)

            return m_new, norm, lax.cond(non_finite, propagate_nonfinite, lambda acc: acc, acc)

        start = (
            jnp.full(lanes, -jnp.inf, jnp.float32),
            jnp.zeros(lanes, jnp.float32),
            jnp.zeros((*lanes, values.shape[-1]), jnp.float32),
        )
        m, norm, acc = lax.fori_loop(row.k_start, row.k_stop, key_tile, vary_together((start, Q))[0])
        row_max = m
        if sinks is not None:
            m = jnp.maximum(row_max, sinks.max(axis=-1)[..., None])
            shift = _finite_or_zero(m)
            alpha = jnp.exp(row_max - shift)
            norm = alpha * norm + jnp.exp(sinks[..., None, :] - shift[..., None]).sum(axis=-1)
            acc = alpha[..., None] * acc
        lse = _finite_or_zero(m) + jnp.log(norm)
        if settings.normalize_output:
            acc = acc / jnp.where(norm == 0, jnp.float32(1), norm)[..., None]
        return acc.astype(settings.result_dtype(call.query.dtype)), lse, row_max

    steps = jnp.arange(grid.batch * grid.q_count, dtype=jnp.int32)
    out, lse, row_max = lax.map(row_chunk, (steps, grid.split_rows(call.query), cut_rows(call, grid)))
    return Forward(grid.join_rows(out), grid.join_row_values(lse), grid.join_row_values(row_max))


def _backward_by_tiles(settings: Settings, call: Call, terms: RowTerms) -> Backward:
    chunks = settings.backward or ChunkSizes()
    grid = cut(call, chunks.q, chunks.k)
    pairs = pairwise_inputs(call, grid)
    keys, values = (_zero_non_finite(grid.split_keys(x)) for x in (call.key, call.value))
    queries, d_outs = grid.split_rows(terms.query), grid.split_rows(terms.d_out)
    lses, deltas = grid.split_row_values(terms.lse, jnp.inf), grid.split_row_values(terms.delta, 0)
    if terms.weight is not None:
        d_outs = d_outs * grid.split_row_values(terms.weight, 0)[..., None]
    dot = partial(jnp.einsum, precision=settings.precision)

    def row_chunk(sums: tuple[jax.Array, jax.Array, jax.Array | None], args: tuple[Any, ...]):
        step, Q, dO, L, delta, row = args

        def key_tile(j: jax.Array, carry: tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None]]):
            dQ, (dK, dV, dbias) = carry
            at = key_chunk(grid, step, j)
            K, V = select(keys, at), select(values, at)
            products = scaled_products(dot, "hgqd,hkd->hgqk", call, Q, K)
            S, visible, slope = tile_logits(call, grid, pairs, row, step, j, products, settings.logits_dtype)
            # No weight is above 1: see `RowTerms`.
            P = _hide(visible, jnp.exp(jnp.minimum(S - L[..., None], jnp.float32(0))))
            dP = tile_dropout(call, grid, pairs, step, j, dot("hgqd,hkd->hgqk", dO, V))
            dS = P * (dP - delta[..., None])
            dS = _hide(visible, dS if slope is None else dS * slope)
            P_kept = tile_dropout(call, grid, pairs, step, j, P)
            dQ = dQ + dot("hgqk,hkd->hgqd", dS, K)
            # Transposed: so XLA copies queries, once a row chunk, and not the weights of each tile.
            dK = _add_at(dK, at, dot("hgqd,hgqk->hdk", Q, dS))
            dV = _add_at(dV, at, dot("hgqd,hgqk->hdk", dO, P_kept))
            if dbias is not None:
                dbias = _add_bias_tile(grid, dbias, step, j, dS)
            return dQ, (dK, dV, dbias)

        dQ, sums = lax.fori_loop(
            row.k_start, row.k_stop, key_tile, (vary_together((jnp.zeros_like(Q), Q))[0], sums)
        )
        return sums, (dQ * call.softmax_scale).astype(settings.result_dtype(call.query.dtype))

    steps = jnp.arange(grid.batch * grid.q_count, dtype=jnp.int32)
    sums = (
        jnp.zeros_like(keys.swapaxes(2, 3)),
        jnp.zeros_like(values.swapaxes(2, 3)),
        None if pairs.bias is None else jnp.zeros_like(pairs.bias),
    )
    rows = (steps, queries, d_outs, lses, deltas, cut_rows(call, grid))
    (dK, dV, dbias), dQ = lax.scan(row_chunk, vary_together((sums, queries))[0], rows)
    return Backward(
        grid.join_rows(dQ),
        grid.join_keys(dK.swapaxes(2, 3) * call.softmax_scale),
        grid.join_keys(dV.swapaxes(2, 3)),
        None if call.bias is None or dbias is None else grid.join_heads(dbias, call.bias.shape),
    )


def _is_small(settings: Settings, call: Call) -> bool:
    """Return whether the call is one piece on every platform, so that the passes may keep weights."""
    return settings.forward is None and settings.backward is None and whole.takes(call)


def _add_bias_tile(grid: Grid, dbias: jax.Array, step: jax.Array, j: jax.Array, dS: jax.Array) -> jax.Array:
    tile = grid.tile(dbias, step, j)
    broadcast = tuple(axis for axis in range(4) if tile.shape[axis] == 1)
    tile = tile + dS.sum(axis=broadcast, keepdims=True)
    return lax.dynamic_update_slice(dbias, tile[None], grid.tile_start(dbias, step, j))


def _add_at(total: jax.Array, index: jax.Array, x: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(total, select(total, index) + x, index, axis=0)


def _hide(visible: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if visible is None else jnp.where(visible, x, jnp.float32(0))


def _zero_non_finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.float32(0))


def _finite_or_zero(m: jax.Array) -> jax.Array:
    """Return a shift for exp: 0 for a row that has seen nothing, since -inf - -inf is NaN."""
    return jnp.where(m == -jnp.inf, jnp.float32(0), m)


@lru_cache(maxsize=256, typed=True)
def _is_precision(precision: Any) -> bool:
    """Return whether a product takes it. Asking JAX takes longer than all other checks of a call."""
    one = jax.ShapeDtypeStruct((1, 1), "float32")
    try:
        jax.eval_shape(partial(jnp.dot, precision=precision), one, one)
    except (TypeError, ValueError):
        return False
    return True


def _check_precision(precision: Any) -> Any:
    """Return the precision for `jax.lax.dot_general`, hashable; None is float32, as elsewhere."""
    if precision is None:
        return lax.Precision.HIGHEST
    if isinstance(precision, list):
        precision = tuple(precision)
    try:
        known = _is_precision(precision)
    except TypeError:  # not hashable
        known = False
    if not known:
        refuse(
            "precision",
            shown(precision),
            "a precision of jax.lax.dot_general",
            "None is full float32, 'default' is what the backend is fastest with.",
        )
    return precision


_check_chunks = partial(check_blocks, expected=(ChunkSizes,), advice="Build it as ChunkSizes(q=256, k=256).")

PASSES = Passes(
    forward=_forward,
    backward=_backward,
    check_forward=partial(_check_chunks, "fwd_params"),
    check_backward=partial(_check_chunks, "bwd_params"),
    check_precision=_check_precision,
)
