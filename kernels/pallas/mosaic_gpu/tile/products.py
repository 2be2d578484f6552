"""Products of tiles whose channels are cut into pieces: one product of the matrix unit for each piece."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu

from attest.kernels.pallas.mosaic_gpu.launch.transfers import Pieces
from attest.kernels.pallas.mosaic_gpu.tile.first_product import overwrite_zeros

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private


def start_product(acc: Any, left: Pieces, i: Any, right: Pieces, j: Any, *, overwrites: bool = False) -> None:
    """Start acc += left[i] right[j]^T, in as many products as there are pieces of the channels.

    acc: [rows of left, rows of right] float32, an accumulator. overwrites: whether the first
    product overwrites it. That has no effect unless acc is 0, as it is allocated.
    """
    for rows, columns in zip(left.tiles, right.tiles, strict=True):
        plgpu.wgmma(acc, rows.at[i], columns.at[j].T)
        if overwrites:
            overwrite_zeros()


def start_sums(accs: Sequence[Any], weights: jax.Array, right: Pieces, j: Any) -> None:
    """Start acc += weights right[j] for each piece of the channels of right, which has an accumulator.

    weights: [64, rows of right], in the dtype of right.
    """
    for acc, rows in zip(accs, right.tiles, strict=True):
        plgpu.wgmma(acc, weights, rows.at[j])


def accumulators(rows: int, widths: Sequence[int]) -> tuple[Any, ...]:
    """Return the allocation of accumulators [rows, width] float32."""
    return tuple(plgpu.ACC((rows, width), jnp.float32) for width in widths)
