"""Dropout masks: a pure function of the seed and of array coordinates.

Clause S12: keep(b, h, i, j) = philox4x32-10(counter = (j >> 2, i, h, b), key = (seed low, seed high))[j & 3]
>= floor(dropout_prob * 2**32). No state, no offset into a flattened array, nothing that a tiling, a backend
or a device count could change: any kernel that follows this page drops the same pairs.

Clause S29: on a shared axis, batch entries or heads, the index in the whole is 0. `dropout_words` leaves out
the origin on that axis, and a kernel leaves out the index within the call.

Paper: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attest.kernels.varying import vary_together

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

type Words4 = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def philox4x32(counter: Words4, key: tuple[jax.Array, jax.Array]) -> Words4:
    """Compute the ten rounds of Philox4x32 on uint32 arrays.

    `counter` holds four arrays of one shape, `key` two scalars; returns four arrays of the counter's shape.
    """

    # Rolled: unrolled, XLA fuses the ten rounds into one kernel that recomputes shared terms, 16 times
    # slower on CPU.
    def one_round(_: int, state: tuple[Words4, tuple[jax.Array, jax.Array]]):
        (c0, c1, c2, c3), (k0, k1) = state
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        mixed = (high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0)
        return mixed, (k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1]))

    words, _ = lax.fori_loop(0, ROUNDS, one_round, vary_together((counter, key)))
    return words


def keep_mask(
    words: jax.Array,
    dropout_prob: float,
    batch: jax.Array,
    heads: jax.Array,
    rows: jax.Array,
    first_column: jax.Array | int,
    columns: int,
    shared: str,
) -> jax.Array:
    """Return the keep mask of one tile, whatever tile it is (clauses S12, S18).

    Args:
        words: [6] uint32, as `dropout_words` returns them; the coordinates below are within the call.
        dropout_prob: static, 0 <= dropout_prob < 1.
        batch: scalar integer, the batch coordinate.
        heads: [heads] integer, query head coordinates.
        rows: [rows] integer, query coordinates.
        first_column: scalar integer, the key coordinate of the tile's first column; any alignment.
        columns: static number of key columns of the tile.
        shared: the coordinates that are 0, as `Call.dropout_shared` has them.

    Returns: [heads, rows, columns] bool, True where the pair is kept.
    """
    of_batch, of_head, of_row, of_key = words[2], words[3], words[4], words[5]
    count = heads.shape[0]
    if "b" in shared:
        batch = jnp.zeros_like(batch)
    if "h" in shared:
        heads = jnp.zeros_like(heads[:1])
    first = jnp.asarray(first_column).astype(jnp.uint32) + of_key
    # One Philox call serves four columns; a tile that starts inside a group needs one more group at its end.
    groups = (columns + 6) // 4
    shape = (heads.shape[0], rows.shape[0], groups)
    counter = (
        jnp.broadcast_to(
            ((first >> 2) + jnp.arange(groups, dtype=jnp.uint32)).reshape(1, 1, groups),
            shape,
        ),
        jnp.broadcast_to((rows.astype(jnp.uint32) + of_row).reshape(1, -1, 1), shape),
        jnp.broadcast_to((heads.astype(jnp.uint32) + of_head).reshape(-1, 1, 1), shape),
        jnp.broadcast_to((batch.astype(jnp.uint32) + of_batch).reshape(1, 1, 1), shape),
    )
    random = philox4x32(counter, (words[0], words[1]))
    keep = jnp.stack(random, axis=-1) >= jnp.uint32(least_kept(dropout_prob))
    keep = keep.reshape(*shape[:2], 4 * groups)
    keep = lax.dynamic_slice_in_dim(keep, (first & 3).astype(jnp.int32), columns, axis=2)
    return jnp.broadcast_to(keep, (count, *keep.shape[1:]))


def least_kept(dropout_prob: float) -> int:
    """Return the least Philox word that keeps its pair, floor(dropout_prob * 2**32) (clause S12)."""
    return int(dropout_prob * 2**32)


def dropout_words(seed: jax.Array, origin: jax.Array | None, shared: str) -> jax.Array:
    """Return [6] uint32: the words of the seed, then the batch entry, head, row and key of `origin` (S23).

    shared: as `Call.dropout_shared`; the batch entry and the head are 0 if they are in it (S29).
    """
    begin = jnp.zeros(4, jnp.uint32) if origin is None else origin.astype(jnp.uint32)
    own = np.array(["b" not in shared, "h" not in shared, True, True], np.uint32)
    return jnp.concatenate((seed, begin if own.all() else begin * own))


def _multiply(word: jax.Array, constant: int) -> tuple[jax.Array, jax.Array]:
    """Return both halves of a 64-bit product, in 16-bit parts: JAX has no uint64 unless x64 is on."""
    half = jnp.uint32(0xFFFF)
    c_low, c_high = jnp.uint32(constant & 0xFFFF), jnp.uint32(constant >> 16)
    w_low, w_high = word & half, word >> 16
    low, cross_a, cross_b = w_low * c_low, w_low * c_high, w_high * c_low
    middle = (low >> 16) + (cross_a & half) + (cross_b & half)
    high = w_high * c_high + (cross_a >> 16) + (cross_b >> 16) + (middle >> 16)
    return high, word * jnp.uint32(constant)
