"""Recomputation of results into which a hidden value leaked as 0 * NaN (clause S4).

The matrix unit multiplies a hidden pair's 0 with whatever is stored behind it. The fast kernels ignore that
and say which rows are not finite. Behind each stands one of these. It reads what the fast kernel said, which
costs a launch and no host synchronisation. Tiles with a row that is not finite are computed anew, in place,
with what may not be seen taken out of the second product.

A program is one warpgroup that takes tiles of 64 by 64 one after the other.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attest.kernels.pallas.mosaic_gpu.blocks import PROGRAMS, ROWS
from attest.kernels.pallas.mosaic_gpu.launch import PROGRAM, launch
from attest.kernels.pallas.mosaic_gpu.repair_tile import Shared
from attest.kernels.pallas.mosaic_gpu.scratch import scratch
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tanh import any_above
from attest.kernels.pallas.mosaic_gpu.tile import BY_COLUMN, load

_READ_TILES = 4  # the most whose rows a thread reads at a time, to see whether any is not finite

type Body = Callable[[KernelSpec, Mapping[str, Any], Shared, Any], None]


def repair(
    body: Body,
    name: str,
    spec: KernelSpec,
    arrays: Mapping[str, jax.Array],
    results: Mapping[str, jax.Array],
    leak: jax.Array,
) -> dict[str, jax.Array]:
    """The results, computed anew in tiles where `leak`, what a fast kernel said of its rows, is NaN.

    arrays: those of the fast kernel. body: one of `repair_tile`, with what it needs of the fast kernel's
    blocks. It writes the results, in the fast kernel's order of sums: to the bit the same where nothing
    leaked. leak: [entries, heads, rows] float32, the rows padded to a multiple of 64.
    """
    # Only the forward kernel's sums depend on how many keys a step takes.
    spec = replace(spec, q_block=ROWS, k_block=spec.k_block if "out" in results else ROWS)
    refs = {name: jax.new_ref(x) for name, x in results.items()}
    launch(
        partial(_program, body, spec, leak.shape[2] // ROWS),
        Shared,
        name,
        {**arrays, "leak": leak.reshape(-1), **refs},
        {},
        scratch(Shared, spec),
        PROGRAMS,
        warpgroups=1,
    )
    # Of a call in a scan, XLA would give the launch a slice of the stacked results to write to, and none of
    # what is there to be changed.
    return lax.optimization_barrier({name: jax.freeze(ref) for name, ref in refs.items()})


def _program(
    body: Body,
    spec: KernelSpec,
    blocks: int,
    arrays: Mapping[str, Any],
    _: Mapping[str, Any],
    shared: Shared,
) -> None:
    """The tiles of a program that have a row that is not finite, and those that are read with them.

    blocks: how many each head has, with those past the end of its rows.
    """
    of_queries = "out" in arrays or "d_query" in arrays
    spec_blocks, heads = (spec.q_blocks, spec.heads) if of_queries else (spec.k_blocks, spec.key_heads)
    tiles = spec.entries * heads * blocks
    together = math.gcd(tiles, _READ_TILES)
    groups = tiles // together
    mine = -(-groups // PROGRAMS)
    begin = lax.axis_index(PROGRAM) * mine

    def one(tile: Any, _: None) -> None:
        head, block = lax.div(tile, blocks), lax.rem(tile, blocks)
        pl.when(block < spec_blocks)(lambda: body(spec, arrays, shared, head * spec_blocks + block))

    def group(i: Any, _: None) -> None:
        rows = pl.ds(i * (together * ROWS), together * ROWS)
        # By column, every warp holds all of them, so that all come to the same answer.
        leaked = any_above(0.0, load(arrays["leak"].at[rows], BY_COLUMN), BY_COLUMN)
        stop = jnp.where(leaked > 0, (i + 1) * together, i * together)
        lax.fori_loop(i * together, stop, one, None)

    lax.fori_loop(begin, jnp.minimum(begin + mine, groups), group, None)
