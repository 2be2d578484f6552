"""A repair by a launch of its own: of results to which several programs of a kernel add (clause S4).

The kernel says which rows are not finite. The launch behind it reads that, which costs a launch and no host
synchronisation. Tiles with such a row are computed anew, in place: see `repair`.

A program is one warpgroup that takes tiles of 64 by 64 one after the other.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attest.kernels.pallas.mosaic_gpu.blocks import PROGRAMS, ROWS
from attest.kernels.pallas.mosaic_gpu.bodies.repair import marked
from attest.kernels.pallas.mosaic_gpu.bodies.repair_tile import Place, Shared
from attest.kernels.pallas.mosaic_gpu.launch.scratch import scratch
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import PROGRAM, launch
from attest.kernels.pallas.mosaic_gpu.schedule.spans import locate
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec

# The most whose rows a warp reads at a time, to see whether any is not finite: 64 numbers a thread. A program
# waits for memory once for so many.
_READ_TILES = 32

type Body = Callable[[KernelSpec, Mapping[str, Any], Shared, Place], None]


def repair(
    body: Body,
    name: str,
    spec: KernelSpec,
    arrays: Mapping[str, jax.Array],
    results: Mapping[str, jax.Array],
    leak: jax.Array,
) -> dict[str, jax.Array]:
    """Recompute the results in tiles where `leak`, by which a fast kernel marks its rows, is NaN.

    arrays: those of the fast kernel. body: one of `repair_tile`, with what it needs of the fast kernel's
    blocks. It writes the results, in the fast kernel's order of sums: to the bit the same where nothing
    leaked. leak: [entries, heads, rows] float32, the rows padded to a multiple of 64.
    """
    spec = spec.with_blocks(ROWS, ROWS)
    # Without the barriers, XLA hands slices to the launch: of an array that it is to change, and then changes
    # none of what is there; of the stacked results of a scan, for what it returns, which hold nothing yet.
    refs = {name: jax.new_ref(x) for name, x in lax.optimization_barrier(dict(results)).items()}
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
    return lax.optimization_barrier({name: jax.freeze(ref) for name, ref in refs.items()})


def _program(
    body: Body,
    spec: KernelSpec,
    blocks: int,
    arrays: Mapping[str, Any],
    _: Mapping[str, Any],
    shared: Shared,
) -> None:
    """Compute the tiles of a program that have a row that is not finite.

    blocks: how many each head has, with those past the end of its rows.
    """
    shape = spec.shape
    of_queries = "d_query" in arrays
    spec_blocks, heads = (shape.q_blocks, shape.heads) if of_queries else (shape.k_blocks, shape.key_heads)
    tiles = shape.batch * heads * blocks
    mine = -(-tiles // PROGRAMS)
    together = min(mine, _READ_TILES)

    def end() -> Any:
        # Computed where it is needed: registers are few.
        return jnp.minimum((lax.axis_index(PROGRAM) + 1) * mine, tiles)

    def leaked(first: Any, count: int) -> Any:
        return marked(arrays["leak"].at[pl.ds(first * ROWS, count * ROWS)])

    def repaired(tile: Any) -> None:
        place = locate(tile, blocks, heads)
        pl.when(place[2] < spec_blocks)(lambda: body(spec, arrays, shared, place))

    def step(tile: Any) -> Any:
        # The last that are read together end with the rows.
        found = leaked(jnp.minimum(tile, tiles - together), together)
        following = jnp.where(found, tile + 1, tile + together)
        pl.when(jnp.logical_and(found, leaked(tile, 1)))(lambda: repaired(tile))
        return following

    lax.while_loop(lambda tile: tile < end(), step, lax.axis_index(PROGRAM) * mine)
