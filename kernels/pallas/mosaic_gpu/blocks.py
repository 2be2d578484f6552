"""Block sizes and schedules of the Hopper kernels: the data table blocks.toml."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attest.kernels.tables import read_table, select

_TABLE = Path(__file__).with_name("blocks.toml")

# To begin and end a tile takes as long as so many blocks of keys; more parts than these are never worth it.
_TILE_BLOCKS = 3
_MOST_PARTS = 64

ROWS = 64  # the rows of one product of a warpgroup: WGMMA's only choice


@dataclass(frozen=True)
class Blocks:
    """How the forward kernel is cut and scheduled; results depend on none of it beyond rounding (S18).

    k: keys a block. stages: slots of the K ring and of the V ring. consumers: warpgroups of 64 query rows
    each. registers: of a thread of a consumer, and of the producer. partial_sums: whether a row's norm is
    kept as 8 sums until the end. programs: how many share the tiles out among them; None is one for each.
    """

    k: int
    stages: int
    consumers: int
    registers: tuple[int, int]
    partial_sums: bool
    programs: int | None = None

    @property
    def own(self) -> int:
        """The query rows of a program's tile."""
        return ROWS * self.consumers


@dataclass(frozen=True)
class BackwardBlocks:
    """How a backward kernel is cut and scheduled.

    step: the keys that a program of backward_query takes at a time, or the queries that one of the others
    takes. stages: slots of each ring. consumers: warpgroups, of 64 query rows each in backward_query and of
    64 keys in the others. registers: as in `Blocks`. ping_pong: whether barriers let consumers start products
    one after another.
    separate: whether backward_key sums dkey and dvalue by a launch each, where registers hold one sum.
    """

    step: int
    stages: int
    consumers: int
    registers: tuple[int, int]
    ping_pong: bool = False
    separate: bool = False

    @property
    def own(self) -> int:
        """The query rows or keys that a program owns."""
        return ROWS * self.consumers


@dataclass(frozen=True)
class BackwardSizes:
    """One choice for each backward kernel; None is the table's."""

    backward_query: BackwardBlocks | None = None
    backward_key: BackwardBlocks | None = None
    backward_bias: BackwardBlocks | None = None


def choose(head_dim: int, work: Collection[str]) -> Blocks:
    """The table's choice for the forward kernel. work: what `spec.work_of` says of the call."""
    return Blocks(**_row("forward", head_dim, work))


def choose_parts(tiles: int, k_blocks: int, programs: int) -> int:
    """How many parts the keys of every tile are cut into, so that `programs` end soonest.

    The parts are equal but for the last, which is not empty.
    """
    cuts = dict.fromkeys(-(-k_blocks // parts) for parts in range(1, min(k_blocks, _MOST_PARTS) + 1))

    def ends(blocks: int) -> int:
        parts = -(-k_blocks // blocks)
        return -(-tiles * parts // programs) * (blocks + _TILE_BLOCKS)

    return -(-k_blocks // min(cuts, key=ends))


def choose_backward(kernel: str, head_dim: int, work: Collection[str]) -> BackwardBlocks:
    """The table's choice for a backward kernel, by name."""
    return BackwardBlocks(**_row(kernel, head_dim, work))


def head_dims() -> tuple[int, ...]:
    """The head dims that the table has rows for, ascending: others are padded to the next."""
    rows = read_table(_TABLE)["sizes"]
    return tuple(sorted({row["head_dim"] for row in rows if row["kernel"] == "forward"}))


def _row(kernel: str, head_dim: int, work: Collection[str]) -> dict[str, Any]:
    row = select(_TABLE, kernel, head_dim, work)
    return row | {"registers": tuple(row["registers"])}
