"""The tiles of a call and the logits of a tile, alike in the forward and the backward pass.

A step is one (batch entry, chunk of query rows); step s is batch entry s // q_count, chunk s % q_count.
Arrays are padded to whole chunks, and what the padding holds is hidden. Everything here is float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from attest.kernels.call.alibi import alibi_term
from attest.kernels.call.call import Call
from attest.kernels.call.symbolic import is_symbolic_size
from attest.kernels.numerics.philox import dropout_words, keep_mask
from attest.kernels.visibility.intervals import array_module, describe_rows, key_block_range, visible_tile


@dataclass(frozen=True)
class Grid:
    """The sizes of the cut: q rows and k keys a tile, k_heads key heads of group query heads each."""

    batch: int
    q_length: int
    k_length: int
    k_heads: int
    group: int
    q: int
    k: int

    @property
    def q_count(self) -> int:
        """Chunks of query rows; at least one, so that empty arrays need no path of their own."""
        return _chunks(self.q_length, self.q)

    @property
    def k_count(self) -> int:
        """Chunks of keys; at least one."""
        return _chunks(self.k_length, self.k)

    def split_rows(self, x: jax.Array) -> jax.Array:
        """Split [B, Sq, Hq, C] to [steps, k_heads, group, q, C] float32."""
        x = _pad(x.astype(jnp.float32), 1, self.q_count * self.q, 0)
        x = x.reshape(self.batch, self.q_count, self.q, self.k_heads, self.group, x.shape[-1])
        return x.transpose(0, 1, 3, 4, 2, 5).reshape(-1, self.k_heads, self.group, self.q, x.shape[-1])

    def join_rows(self, x: jax.Array) -> jax.Array:
        """Invert `split_rows`, dtype kept."""
        x = x.reshape(self.batch, self.q_count, self.k_heads, self.group, self.q, x.shape[-1])
        x = x.transpose(0, 1, 4, 2, 3, 5)
        return x.reshape(self.batch, -1, self.k_heads * self.group, x.shape[-1])[:, : self.q_length]

    def split_row_values(self, x: jax.Array, fill: Any) -> jax.Array:
        """Split [B, Hq, Sq] to [steps, k_heads, group, q], dtype kept."""
        x = _pad(x, 2, self.q_count * self.q, fill)
        x = x.reshape(self.batch, self.k_heads, self.group, self.q_count, self.q)
        return x.transpose(0, 3, 1, 2, 4).reshape(-1, self.k_heads, self.group, self.q)

    def join_row_values(self, x: jax.Array) -> jax.Array:
        """Invert `split_row_values`."""
        x = x.reshape(self.batch, self.q_count, self.k_heads, self.group, self.q).transpose(0, 2, 3, 1, 4)
        return x.reshape(self.batch, self.k_heads * self.group, -1)[..., : self.q_length]

    def split_keys(self, x: jax.Array) -> jax.Array:
        """Split [B, Sk, Hkv, C] to [B * k_count, k_heads, k, C] float32."""
        x = _pad(x.astype(jnp.float32), 1, self.k_count * self.k, 0)
        x = x.reshape(self.batch, self.k_count, self.k, self.k_heads, x.shape[-1])
        return x.transpose(0, 1, 3, 2, 4).reshape(-1, self.k_heads, self.k, x.shape[-1])

    def join_keys(self, x: jax.Array) -> jax.Array:
        """Invert `split_keys`, dtype kept."""
        x = x.reshape(self.batch, self.k_count, self.k_heads, self.k, x.shape[-1]).transpose(0, 1, 3, 2, 4)
        return x.reshape(self.batch, -1, self.k_heads, x.shape[-1])[:, : self.k_length]

    def split_heads(self, x: jax.Array) -> jax.Array:
        """Split [B or 1, Hq or 1, Sq or 1, Sk or 1], padded, into key heads and a group, or 1 and 1."""
        rows = self.q_count * self.q if x.shape[2] == self.q_length else 1
        keys = self.k_count * self.k if x.shape[3] == self.k_length else 1
        x = _pad(_pad(x, 2, rows, 0), 3, keys, 0)
        heads = (1, 1) if x.shape[1] == 1 else (self.k_heads, self.group)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    def join_heads(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Invert `split_heads` for an array that had `shape`."""
        x = x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
        return x[:, :, : shape[2], : shape[3]]

    def tile_start(self, x: jax.Array, step: jax.Array, j: jax.Array) -> tuple[jax.Array, ...]:
        """Return where key chunk j's tile begins in what `split_heads` made; broadcast axes begin at 0."""
        zero = jnp.zeros_like(step)
        batch = step // self.q_count if x.shape[0] != 1 else zero
        row = (step % self.q_count) * self.q if x.shape[3] != 1 else zero
        return batch, zero, zero, row, j * self.k if x.shape[4] != 1 else zero

    def tile(self, x: jax.Array, step: jax.Array, j: jax.Array) -> jax.Array:
        """Return [k_heads or 1, group or 1, q or 1, k or 1]: the tile itself."""
        q, k = (
            1 if length == 1 else size for length, size in zip(x.shape[3:], (self.q, self.k), strict=True)
        )
        sizes = (1, *x.shape[1:3], q, k)
        return lax.dynamic_slice(x, self.tile_start(x, step, j), sizes)[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowChunks:
    """The rows of each step, as visibility and ALiBi need them, and the key chunks that its rows may see."""

    first: jax.Array | None  # [steps, q] int32
    last: jax.Array | None  # [steps, q] int32
    lowest: jax.Array | None  # [steps, q] int32
    highest: jax.Array | None  # [steps, q] int32
    position: jax.Array | None  # [steps, q] int32
    segment_ids: jax.Array | None  # [steps, q] int32
    k_start: jax.Array  # [steps] int32
    k_stop: jax.Array  # [steps] int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PairwiseInputs:
    """The inputs per pair or per key, ready to be sliced into tiles."""

    mask: jax.Array | None  # as `Grid.split_heads` makes it
    bias: jax.Array | None  # likewise, float32
    segment_ids: jax.Array | None  # [B * k_count, k] int32
    positions: jax.Array | None  # [B * k_count, k] int32
    slopes: jax.Array | None  # [B or 1, k_heads, group] float32
    dropout: jax.Array | None  # [6] uint32, of `dropout_words`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighed:
    """The residuals that the forward pass in one piece keeps for its backward pass.

    norm: what out was divided by, [b, H, q]. weights: relative to the row maximum, [b, H, q, k]. slope: the
    derivative of the cap. keep: the keep mask.
    """

    norm: jax.Array
    weights: jax.Array
    slope: jax.Array | None
    keep: jax.Array | None


def cut(call: Call, q: int, k: int) -> Grid:
    """Return the grid of `call` for chunks of at most q rows and k keys."""
    batch, q_length, q_heads, _ = call.query.shape
    k_length, k_heads = call.key.shape[1:3]
    return Grid(
        batch=batch,
        q_length=q_length,
        k_length=k_length,
        k_heads=k_heads,
        group=q_heads // k_heads,
        q=q if is_symbolic_size(q_length) else max(1, min(q, q_length)),
        k=k if is_symbolic_size(k_length) else max(1, min(k, k_length)),
    )


def cut_rows(call: Call, grid: Grid) -> RowChunks:
    """Return visibility of every step; rows and keys that only fill up a chunk are hidden."""
    xp = array_module(call)
    rows = describe_rows(call, xp=xp)
    first, last = rows.first, rows.last
    q_padded, k_padded = grid.q_count * grid.q, grid.k_count * grid.k
    if last is None and (q_padded != grid.q_length or k_padded != grid.k_length):
        last = xp.full((1, grid.q_length), grid.k_length - 1, jnp.int32)

    def split(x: jax.Array | None, fill: Any) -> jax.Array | None:
        if x is None:
            return None
        x = jnp.broadcast_to(_pad(x, 1, q_padded, fill), (grid.batch, q_padded))
        return x.reshape(-1, grid.q)

    first, last = split(first, 0), split(last, -1)
    k_start, k_stop = key_block_range(first, last, grid.k, grid.k_count)
    steps = (grid.batch * grid.q_count,)
    return RowChunks(
        first=first,
        last=last,
        lowest=split(rows.lowest, 0),
        highest=split(rows.highest, 0),
        position=split(rows.position, 0),
        segment_ids=split(call.q_segment_ids, -1),
        k_start=jnp.broadcast_to(k_start, steps),
        k_stop=jnp.broadcast_to(k_stop, steps),
    )


def pairwise_inputs(call: Call, grid: Grid) -> PairwiseInputs:
    """Return mask, bias and key segments of `call`, padded to whole chunks."""

    def by_key(x: jax.Array | None, fill: int) -> jax.Array | None:
        if x is None:
            return None
        x = jnp.broadcast_to(x, (grid.batch, grid.k_length))
        return _pad(x, 1, grid.k_count * grid.k, fill).reshape(-1, grid.k)

    return PairwiseInputs(
        mask=None if call.attention_mask is None else grid.split_heads(call.attention_mask),
        bias=None if call.bias is None else grid.split_heads(call.bias.astype(jnp.float32)),
        segment_ids=by_key(call.kv_segment_ids, -1),
        positions=by_key(call.positions.kv, 0),
        slopes=grouped_slopes(call),
        dropout=None
        if call.dropout_seed is None
        else dropout_words(call.dropout_seed, call.positions.origin, call.dropout_shared),
    )


def split_scale(scale: float) -> tuple[float, float]:
    """Split the softmax scale into a factor of the query and one of the products q . k, a power of two.

    So the logits are computed to the same bits wherever a compiler computes them anew: a rounded product of
    a scale, fused with the subtraction of the row maximum, would be off by units in the last place, which at
    logits of 1e9 are hundreds. Neither factor overflows where the logit itself does not.
    """
    if abs(scale) <= 1:
        return scale, 1.0
    fraction, exponent = math.frexp(scale)
    return 2 * fraction, 2.0 ** (exponent - 1)


def capped(bounded: jax.Array, cap: float) -> jax.Array:
    """Return cap * bounded, as one rounded number wherever it is used.

    Nothing reaches the limits, but a compiler cannot fuse a multiplication through them with a subtraction.
    """
    return jnp.clip(cap * bounded, -2 * cap, 2 * cap)


def scaled_products(
    dot: Callable[[str, jax.Array, jax.Array], jax.Array], axes: str, call: Call, Q: jax.Array, K: jax.Array
) -> jax.Array:
    """Return scale * (Q . K), where `dot` multiplies along the axes of an einsum (S1)."""
    of_query, of_products = split_scale(call.softmax_scale)
    products = dot(axes, Q * of_query, K)
    return products if of_products == 1 else products * of_products


def tile_logits(
    call: Call,
    grid: Grid,
    pairs: PairwiseInputs,
    row: RowChunks,
    step: jax.Array,
    j: jax.Array,
    logits: jax.Array,
    logits_dtype: str,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return logits, visibility, cap slope of a tile from scaled products [k_heads, group, q, k] (S1 to S5).

    Returns (logits, visible, slope): logits are -inf where hidden; visible is None where the tile is not
    restricted; slope is the derivative of the cap, 1 - tanh^2, None without a cap.
    """
    bias = None if pairs.bias is None else grid.tile(pairs.bias, step, j)

    def of_rows(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x[None, None]

    def of_keys(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else select(x, key_chunk(grid, step, j))[None, None]

    keys = j * grid.k + jnp.arange(grid.k, dtype=jnp.int32)
    positions = of_keys(pairs.positions)
    visible = visible_tile(
        keys,
        of_rows(row.first),
        of_rows(row.last),
        of_rows(row.segment_ids),
        of_keys(pairs.segment_ids),
        None if pairs.mask is None else grid.tile(pairs.mask, step, j),
        bias,
        of_rows(row.lowest),
        of_rows(row.highest),
        positions,
    )
    alibi = None
    if pairs.slopes is not None and row.position is not None:
        slopes = pairs.slopes[0] if pairs.slopes.shape[0] == 1 else select(pairs.slopes, step // grid.q_count)
        stand = keys[None, None] if positions is None else positions
        alibi = alibi_term(slopes[..., None, None], row.position[None, None, :, None], stand[..., None, :])
    logits, slope = restricted_logits(call, logits, bias, alibi, visible, logits_dtype)
    return logits, visible, slope


def restricted_logits(
    call: Call,
    logits: jax.Array,
    bias: jax.Array | None,
    alibi: jax.Array | None,
    visible: jax.Array | None,
    logits_dtype: str,
) -> tuple[jax.Array, jax.Array | None]:
    """Return logits, -inf where hidden, and cap slope, from scaled products and what broadcasts against them.

    alibi: the term, as `alibi_term` returns it.
    """
    if logits_dtype != "float32":
        # A convert there and back may be elided by XLA; reduce_precision may not.
        info = jnp.finfo(logits_dtype)
        logits = lax.reduce_precision(logits, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    if alibi is not None:
        logits = logits + alibi
    slope = None
    if call.logits_soft_cap is not None:
        bounded = jnp.tanh(logits / call.logits_soft_cap)
        logits, slope = capped(bounded, call.logits_soft_cap), 1 - bounded * bounded
    return (logits if visible is None else jnp.where(visible, logits, -jnp.inf)), slope


def tile_dropout(
    call: Call, grid: Grid, pairs: PairwiseInputs, step: jax.Array, j: jax.Array, x: jax.Array
) -> jax.Array:
    """Return x [k_heads, group, q, k], 0 at dropped pairs, kept ones scaled by 1 / (1 - r) (S12)."""
    if pairs.dropout is None:
        return x
    keep = keep_mask(
        pairs.dropout,
        call.dropout_prob,
        batch=step // grid.q_count,
        heads=jnp.arange(grid.k_heads * grid.group, dtype=jnp.int32),
        rows=(step % grid.q_count) * grid.q + jnp.arange(grid.q, dtype=jnp.int32),
        first_column=j * grid.k,
        columns=grid.k,
        shared=call.dropout_shared,
    )
    return jnp.where(keep.reshape(x.shape), x * (1 / (1 - call.dropout_prob)), jnp.float32(0))


def key_chunk(grid: Grid, step: jax.Array, j: jax.Array) -> jax.Array:
    """Return the index of key chunk j of the step's batch entry in an array that `Grid.split_keys` made."""
    return (step // grid.q_count) * grid.k_count + j


def select(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return x[index] along the first axis, as a slice and not a gather."""
    return lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False)


@custom_vmap
def any_nonfinite(x: jax.Array) -> jax.Array:
    """Return whether something in x is not finite; under `jax.vmap`, anywhere along the mapped axis.

    It decides whether a loop runs: of a number of steps for each entry `jax.vmap` would make one more loop,
    and JAX fails where the mapped axis is sharded over an explicit mesh.
    """
    return ~jnp.isfinite(x).all()


@any_nonfinite.def_vmap
def _(_size: int, _in_batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    return any_nonfinite(x), False


def _chunks(length: int, size: int) -> int:
    """Return how many chunks hold a length; a symbolic one is at least 1."""
    count = -(-length // size)
    return count if is_symbolic_size(length) else max(1, count)


def _pad(x: jax.Array, axis: int, length: int, fill: Any) -> jax.Array:
    if x.shape[axis] == length:
        return x
    widths = [(0, length - x.shape[axis]) if a == axis else (0, 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)


def grouped_slopes(call: Call) -> jax.Array | None:
    """Return the slopes of ALiBi as [B or 1, k_heads, group]."""
    return None if call.alibi_slopes is None else call.alibi_slopes.reshape(-1, *_grouped_heads(call))


def _grouped_heads(call: Call) -> tuple[int, int]:
    k_heads = call.key.shape[2]
    return k_heads, call.query.shape[2] // k_heads


def grouped_sinks(call: Call, dtype: Any = jnp.float32) -> jax.Array | None:
    """Return the sinks as [k_heads, group, num_sinks], or [1, 1, num_sinks] where all heads share them."""
    sinks = call.softmax_aux
    if sinks is None:
        return None
    heads = _grouped_heads(call) if sinks.shape[0] > 1 else (1, 1)
    return sinks.astype(dtype).reshape(*heads, sinks.shape[-1])
