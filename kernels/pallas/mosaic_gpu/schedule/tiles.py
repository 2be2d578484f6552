"""The tiles of the forward kernel: how many there are, and which a program takes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from attest.kernels.pallas.mosaic_gpu.blocks import Blocks
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import PROGRAM
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec


def tiles(spec: KernelSpec) -> int:
    """Return the number of tiles in a launch."""
    shape = spec.shape
    return shape.entries * shape.heads * shape.q_blocks


def over_tiles[T](
    spec: KernelSpec,
    blocks: Blocks,
    arrays: Mapping[str, Any],
    load: Callable[[Any], T],
    work: Callable[[Any, Any, T, Any], Any],
) -> None:
    """Call work(nth, tile, load(tile), count) for every tile of this program.

    nth: the tiles taken before. count: the key blocks taken so far; work returns it with its own. What is
    loaded of the next tile comes from memory while this tile is at work.
    """
    program = lax.axis_index(PROGRAM)
    if blocks.programs is None:
        work(jnp.int32(0), program, load(program), jnp.int32(0))
        return
    programs = blocks.programs
    if "schedule" in arrays:
        mine = arrays["schedule"].at[program]

        def scheduled(i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            tile, count = carry
            # Loaded while this tile is at work; behind the last one the first is loaded again.
            following = mine[lax.rem(i, mine[0]) + 1]
            return following, work(i - 1, tile, load(tile), count)

        lax.fori_loop(1, mine[0] + 1, scheduled, (mine[1] + 0, jnp.int32(0)))
        return

    def nth_tile(i: Any) -> Any:
        return i * programs + _place(program, programs, i)

    def one(i: Any, carry: tuple[T, Any]) -> tuple[T, Any]:
        loaded, count = carry
        # Behind the last tile of this program there may be none.
        following = load(jnp.minimum(nth_tile(i + 1), tiles(spec) - 1))
        return following, work(i, nth_tile(i), loaded, count)

    whole_rounds, rest = divmod(tiles(spec), programs)
    mine = whole_rounds + (_place(program, programs, whole_rounds) < rest).astype(jnp.int32)
    lax.fori_loop(0, mine, one, (load(program), jnp.int32(0)))


def _place(program: Any, programs: int, nth: Any) -> Any:
    """Return the tile of a program in a round: every other round runs backwards, to spread long tiles."""
    return jnp.where(nth % 2 == 0, program, programs - 1 - program)


def batch_and_part(spec: KernelSpec, entry: Any) -> tuple[Any, Any]:
    """Return the batch row, and the part of the keys, of an entry of the results."""
    shape = spec.shape
    return (entry, 0) if shape.key_parts == 1 else (lax.rem(entry, shape.batch), lax.div(entry, shape.batch))
