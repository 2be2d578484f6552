"""The tiles of the forward kernel: how many there are, and which a program takes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from attest.kernels.pallas.mosaic_gpu.blocks import Blocks
from attest.kernels.pallas.mosaic_gpu.launch import PROGRAM
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec


def tiles(spec: KernelSpec) -> int:
    """How many there are in a launch."""
    return spec.entries * spec.heads * spec.q_blocks


def over_tiles(
    spec: KernelSpec, blocks: Blocks, arrays: Mapping[str, Any], work: Callable[[Any, Any], Any]
) -> None:
    """work(tile, count) for every tile of this program: from and to the number of key blocks taken so far."""
    program = lax.axis_index(PROGRAM)
    if blocks.programs is None:
        work(program, jnp.int32(0))
        return
    programs = min(blocks.programs, tiles(spec))
    if "schedule" in arrays:
        mine = arrays["schedule"].at[program]

        def scheduled(i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            tile, count = carry
            # Loaded while this tile is at work; behind the last one the first is loaded again.
            following = mine[lax.rem(i, mine[0]) + 1]
            return following, work(tile, count)

        lax.fori_loop(1, mine[0] + 1, scheduled, (mine[1] + 0, jnp.int32(0)))
        return

    def one(i: Any, count: Any) -> Any:
        return work(i * programs + _place(program, programs, i), count)

    whole_rounds, rest = divmod(tiles(spec), programs)
    mine = whole_rounds + (_place(program, programs, whole_rounds) < rest).astype(jnp.int32)
    lax.fori_loop(0, mine, one, jnp.int32(0))


def _place(program: Any, programs: int, nth: Any) -> Any:
    """Which tile of a round a program takes: every other round backwards, so that none gets all long ones."""
    return jnp.where(nth % 2 == 0, program, programs - 1 - program)


def batch_and_part(spec: KernelSpec, entry: Any) -> tuple[Any, Any]:
    """The batch row, and the part of the keys, of an entry of the results."""
    return (entry, 0) if spec.parts == 1 else (lax.rem(entry, spec.batch), lax.div(entry, spec.batch))
