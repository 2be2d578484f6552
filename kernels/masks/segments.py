"""Segment ids that say the same as a MaskInfo: from its structure, or from the values of its mask (S8)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.call.options import refuse
from attest.kernels.masks.conditions import Conditions
from attest.kernels.masks.sizes import Sizes
from attest.kernels.masks.visible_pairs import tokens_of, visible_pairs, within

PADDING = -1


def segment_ids_of(info: Conditions, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Return ids int32 [B or 1, Sq] and [B or 1, Sk] that make exactly the visible pairs of `info`.

    Lengths become ids without a look at values. For anything else the mask is computed and must be
    block-diagonal, up to the order of rows and keys.

    Raises: ValueError where no ids make the mask, or where it is traced, so that nobody can tell.
    """
    others = (info.attention_mask, info.q_segment_ids, info.kv_start, info.kv_end)
    by_position = info.causal or info.chunk_sizes or info.sliding_window != (None, None)
    if by_position or any(x is not None for x in others):
        return _from_values(info, sizes)
    return _from_lengths(info, sizes)


def _from_lengths(info: Conditions, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    if info.cum_seqlens_q is not None and info.cum_seqlens_k is not None:
        q_ids = tokens_of(info.cum_seqlens_q, info.packed, sizes.queries()).sequence
        kv_ids = tokens_of(info.cum_seqlens_k, info.packed, sizes.keys()).sequence
    else:
        q_ids = jnp.zeros((1, sizes.queries()), jnp.int32)
        kv_ids = jnp.zeros((1, sizes.keys()), jnp.int32)
    if info.kv_lengths is not None:
        kv_ids = hide_keys(kv_ids, within(info.kv_lengths, sizes.keys()))
    return q_ids, kv_ids


def hide_keys(kv_ids: jax.Array, visible: jax.Array) -> jax.Array:
    """Return ids [B or 1, Sk] with those of hidden keys made padding."""
    return jnp.where(visible, kv_ids, jnp.int32(PADDING))


def _from_values(info: Conditions, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(info)):
        refuse(
            "mask_info",
            "a traced mask",
            "a concrete one, as only values tell whether a mask is block-diagonal",
            "Compute the ids outside of jax.jit, or store them: MaskInfo.from_segments.",
        )
    with jax.ensure_compile_time_eval():
        visible = visible_pairs(info, sizes)
        assert visible is not None
        shape = (*visible.shape[:2], sizes.queries(), sizes.keys())
        mask = np.broadcast_to(np.asarray(visible), shape)
        if (mask != mask[:, :1]).any():
            refuse(
                "mask_info",
                f"a mask that differs between its {mask.shape[1]} heads",
                "one mask for all heads, as ids have no heads",
                "Pass the mask itself.",
            )
        ids = [_blocks(entry[0], number) for number, entry in enumerate(mask)]
        q_shape, k_shape = (len(ids), shape[2]), (len(ids), shape[3])
        q_ids, kv_ids = (np.array([each[side] for each in ids], np.int32) for side in (0, 1))
        return jnp.asarray(q_ids.reshape(q_shape)), jnp.asarray(kv_ids.reshape(k_shape))


def _blocks(mask: np.ndarray, entry: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of rows and of keys of one mask [Sq, Sk], or a refusal that names a row.

    A block is named by the first key that its rows see. A row that sees nothing is a token, not padding,
    which matters to sinks (S11): it has an id that no key has.
    """
    if not mask.size:
        return np.zeros(mask.shape[0], np.int32), np.full(mask.shape[1], PADDING, np.int32)
    sees, seen = mask.any(axis=1), mask.any(axis=0)
    rows = np.where(sees, mask.argmax(axis=1), mask.shape[1])
    keys = np.where(seen, rows[mask.argmax(axis=0)], PADDING)
    wrong = (rows[:, None] == keys) != mask
    if wrong.any():
        row = int(wrong.any(axis=1).argmax())
        refuse(
            "mask_info",
            f"in batch entry {entry} row {row}, which shares some but not all of its keys with another row",
            "a block-diagonal mask, in which two rows see the same keys or have none in common",
            "Pass the mask itself; segment ids cannot express it.",
        )
    names, numbers = np.unique(rows, return_inverse=True)
    # Visible keys are named as some row is.
    return numbers.reshape(-1), np.where(seen, np.searchsorted(names, keys), PADDING)
