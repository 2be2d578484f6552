"""Block sizes and schedules of the Hopper kernels: the data table blocks.toml."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from attest.kernels.call.call import Call
from attest.kernels.call.options import refuse
from attest.kernels.configs.fields import check_fields, read_fields
from attest.kernels.configs.tables import read_table, select_all

_TABLE = Path(__file__).with_name("blocks.toml")

# To begin and end a tile takes as long as so many blocks of keys; more parts than these are never worth it.
TILE_BLOCKS = 3
_MOST_PARTS = 64
# With one slot the forward kernel would wait for a block that it has not yet freed.
LEAST_STAGES = 2

PROGRAMS = 132  # that run at once: one for each multiprocessor of an H200
ROWS = 64  # the rows of one product of a warpgroup: WGMMA's only choice


@dataclass(frozen=True)
class Blocks:
    """The cut and schedule of the forward kernel; results depend on none of it beyond rounding (S18).

    k: keys a block, a multiple of 64. stages: slots of the K ring and of the V ring. consumers: warpgroups of
    64 query rows each. registers: of a thread of a consumer, and of the producer; multiples of 8 that fit the
    register file together. partial_sums: whether a row's norm is kept as 8 sums until the end. programs: how
    many share the tiles out among them; None is one for each. adds_to_zeros: whether the first product of
    a tile's logits is added to zeros instead of overwriting registers. That takes more instructions, and yet
    some kernels are faster.
    """

    k: int
    stages: int
    consumers: int
    registers: tuple[int, int]
    partial_sums: bool
    programs: int | None = None
    adds_to_zeros: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _check_limits(self, "k")
        if self.stages < LEAST_STAGES:
            expected = f"at least {LEAST_STAGES}"
            refuse(
                "Blocks.stages", self.stages, expected, "A consumer starts a block before it ends the last."
            )

    @property
    def own(self) -> int:
        """The query rows of a program's tile."""
        return ROWS * self.consumers

    @property
    def query_stages(self) -> int:
        """The slots for a tile's query: another for the next one's where programs take several tiles."""
        return 1 if self.programs is None else 2

    @property
    def computing(self) -> int:
        """The warpgroups of a program that compute."""
        return self.consumers

    @property
    def value_slots(self) -> int:
        """The slots of the V ring."""
        return self.stages

    @property
    def warpgroups(self) -> int:
        """The warpgroups of a program: the consumers, and one that copies what they read."""
        return self.consumers + 1


@dataclass(frozen=True)
class BackwardBlocks:
    """The cut and schedule of a backward kernel.

    step: the keys that a program of backward_query takes at a time, or the queries that one of the others
    takes; a multiple of 64. stages: slots of each ring. value_stages: of backward_query's V ring, if it has
    others. consumers: warpgroups, of 64 query rows each in backward_query and of 64 keys in the others.
    registers: as in `Blocks`. ping_pong: whether barriers let consumers start products one after another.
    separate: whether backward_key sums dkey and dvalue by a launch each, where registers hold one sum.
    split: whether two warpgroups share the 64 keys of one consumer: one sums dkey, the other dvalue.
    fused: whether backward_key sums dquery, too, and backward_query is not launched; only for calls whose
    pairs causal order alone may hide. copies: how many copies of each key head backward_key computes
    with, each for an equal part of the group's query heads; only their greatest common divisor with the group
    is used. None lets the kernel choose. joint: whether the launch of backward_key has the programs of
    backward_query, too, with as many consumers and registers. None lets the kernel choose.
    """

    step: int
    stages: int
    consumers: int
    registers: tuple[int, int]
    ping_pong: bool = False
    separate: bool = False
    split: bool = False
    fused: bool = False
    value_stages: int | None = None
    copies: int | None = None
    joint: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        _check_limits(self, "step")
        if self.fused and (self.separate or self.step not in (ROWS, self.own)):
            got = f"step {self.step}, separate {self.separate} with {self.consumers} consumers"
            expected = f"step {ROWS} or {self.own} and not separate"
            refuse("BackwardBlocks.fused", got, expected, "A consumer sums 64 rows of dquery in a step.")
        if self.joint and (self.separate or self.split or self.fused):
            got = f"separate {self.separate}, split {self.split}, fused {self.fused}"
            refuse(
                "BackwardBlocks.joint", got, "none of these", "Use False, or None to let the kernel choose."
            )
        if self.split and (self.separate or self.fused or self.ping_pong or self.consumers > 1):
            got = f"separate {self.separate}, fused {self.fused}, ping_pong {self.ping_pong}"
            got, expected = f"{got} with {self.consumers} consumers", "none of these, and one consumer"
            refuse("BackwardBlocks.split", got, expected, "Registers have room for the keys of one.")

    @property
    def computing(self) -> int:
        """The warpgroups of a program that compute."""
        return self.consumers * (2 if self.split else 1)

    @property
    def warpgroups(self) -> int:
        """The warpgroups of a program: some that compute, one that copies, if fused one that sums dquery."""
        return self.computing + (2 if self.fused else 1)

    @property
    def own(self) -> int:
        """The query rows or keys that a program owns."""
        return ROWS * self.consumers

    @property
    def value_slots(self) -> int:
        """The slots of the ring of value, or of the cotangent of out."""
        return self.stages if self.value_stages is None else self.value_stages

    @property
    def unsplit(self) -> "BackwardBlocks":
        """The same with a launch for each of two sums, where a program may have several consumers."""
        return replace(self, split=False, separate=True) if self.split else self


@dataclass(frozen=True)
class BackwardSizes:
    """One choice for each backward kernel; None is the table's, not fused where backward_query is chosen."""

    backward_query: BackwardBlocks | None = None
    backward_key: BackwardBlocks | None = None
    backward_bias: BackwardBlocks | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.fused and self.backward_query is not None:
            got = f"{self.backward_query} beside a fused backward_key"
            refuse("BackwardSizes.backward_query", got, "None", "A fused backward_key sums dquery itself.")
        for name in ("backward_key", "backward_bias"):
            blocks = getattr(self, name)
            if blocks is not None and blocks.value_stages is not None:
                field = f"BackwardSizes.{name}.value_stages"
                refuse(field, blocks.value_stages, "None", "Only backward_query's rings may differ.")

    @property
    def fused(self) -> bool:
        """Whether one kernel is to sum dquery, dkey and dvalue."""
        return self.backward_key is not None and self.backward_key.fused


@dataclass(frozen=True)
class Config:
    """The block sizes of a call; None lets the table choose. See `attest.kernels.config`."""

    forward: Blocks | None = None
    backward: BackwardSizes | None = None

    def __post_init__(self) -> None:
        check_fields(self)


def choose(
    head_dim: int,
    value_dim: int,
    work: Collection[str],
    queries: int | None = None,
    fits: Callable[[Blocks], bool] | None = None,
    heads: int = PROGRAMS,
) -> Blocks:
    """Return the table's choice for the forward kernel.

    work: what `spec.work_of` says of the call. queries: its rows; heads: those of all batch rows. Rows of the
    table that have a speed are rivals: the last tile of each head may have few rows, which take as long as
    all, and where tiles take equally long, programs take whole rounds of them. fits: whether shared memory
    has room for blocks; the first that fit are taken.
    """
    rows = select_all(_TABLE, "forward", head_dim, work, value_dim=value_dim)
    rows = _fitting(rows, _forward_blocks, fits)
    return _forward_blocks(_fastest(rows, work, queries, heads) if queries else rows[0])


def choose_parts(tiles: int, k_blocks: int, programs: int) -> int:
    """Return how many parts the keys of every tile are cut into, so that `programs` end soonest.

    The parts are equal but for the last, which is not empty.
    """
    cuts = dict.fromkeys(-(-k_blocks // parts) for parts in range(1, min(k_blocks, _MOST_PARTS) + 1))

    def ends(blocks: int) -> int:
        parts = -(-k_blocks // blocks)
        return -(-tiles * parts // programs) * (blocks + TILE_BLOCKS)

    return -(-k_blocks // min(cuts, key=ends))


def choose_backward(
    kernel: str,
    head_dim: int,
    value_dim: int,
    work: Collection[str],
    fits: Callable[[BackwardBlocks], bool] | None = None,
    queries: int = 0,
    heads: int = PROGRAMS,
    prefers: Callable[[BackwardBlocks], bool] | None = None,
) -> BackwardBlocks:
    """Return the table's choice for a backward kernel, by name. queries: of a head. The rest as in `choose`.

    Rows of backward_query that have a speed are rivals, too: those that are preferred, if there are any.
    """
    rows = select_all(_TABLE, kernel, head_dim, work, value_dim=value_dim)
    rows = tuple(row for row in rows if queries >= row.get("least_queries", 0))
    rows = _fitting(rows, _backward_blocks, fits)
    if prefers is not None and "speed" in rows[0]:
        rows = tuple(row for row in rows if prefers(_backward_blocks(row))) or rows
    return _backward_blocks(_fastest(rows, work, queries, heads) if queries else rows[0])


def rounds(tiles: int, work: Collection[str]) -> float:
    """Return for how many tiles of average length a launch of so many lasts.

    Where bounds make tiles differ in length, long ones come first, and the others fill the gaps.
    """
    return max(tiles / PROGRAMS, 1) if "bounds" in work else -(-tiles // PROGRAMS)


def head_dims() -> tuple[tuple[int, int], ...]:
    """Return the head dims that the table has rows for, ascending: of query and key, and of value."""
    rows = read_table(_TABLE)["sizes"]
    dims = {(row["head_dim"], row.get("value_dim", row["head_dim"])) for row in rows}
    return tuple(sorted(dims))


def pad_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the first head dims of the table that are not below these: those of the tiles."""
    return next(dims for dims in head_dims() if dims[0] >= head_dim and dims[1] >= value_dim)


def tile_dims(call: Call) -> tuple[int, int]:
    """Return the head dims of a call's tiles: of query and key, and of value."""
    return pad_dims(call.query.shape[3], call.value.shape[3])


def _fastest(
    rows: tuple[dict[str, Any], ...], work: Collection[str], queries: int, heads: int
) -> Mapping[str, Any]:
    """Return the first row, or the fastest of the rows with a speed if the table begins with them."""
    rivals = tuple(takewhile(lambda row: "speed" in row, rows))

    def time(row: Mapping[str, Any]) -> float:
        own = ROWS * row["consumers"]
        return rounds(-(-queries // own) * heads, work) * own / row["speed"]

    return min(rivals, key=time) if rivals else rows[0]


def _forward_blocks(row: Mapping[str, Any]) -> Blocks:
    return read_fields(
        Blocks, "block sizes of forward", {name: x for name, x in row.items() if name != "speed"}
    )


def _backward_blocks(row: Mapping[str, Any]) -> BackwardBlocks:
    fields = {name: x for name, x in row.items() if name not in ("least_queries", "speed")}
    return read_fields(BackwardBlocks, "block sizes of a backward kernel", fields)


def columns(blocks: Blocks | BackwardBlocks) -> dict[str, Any]:
    """Return block sizes as the columns of a row."""
    return {name: x for name, x in asdict(blocks).items() if x is not None and (x or name == "partial_sums")}


def _fitting[T](
    rows: tuple[dict[str, Any], ...],
    blocks: Callable[[Mapping[str, Any]], T],
    fits: Callable[[T], bool] | None,
) -> tuple[dict[str, Any], ...]:
    """Return the rows that fit; the last, which is the smallest, if none does."""
    return tuple(row for row in rows if fits is None or fits(blocks(row))) or rows[-1:]


def _check_limits(blocks: Blocks | BackwardBlocks, block: str) -> None:
    """Refuse what the kernels, their launch or the assembler would refuse.

    block: the name of the field for the size of a block.

    Raises: ValueError naming class and field.
    """
    of, limits = type(blocks).__name__, read_table(_TABLE)["limits"]
    size, unit, most = getattr(blocks, block), limits["block_unit"], limits["largest_block"]
    if size % unit or size > most:
        refuse(f"{of}.{block}", size, f"a multiple of {unit} up to {most}", f"Use {unit} or {2 * unit}.")
    if blocks.computing > limits["consumers"]:
        refuse(f"{of}.consumers", blocks.consumers, f"at most {limits['consumers']}", "Use 2 or 3.")
    unit, (least, most) = limits["register_unit"], limits["registers"]
    for registers in blocks.registers:
        if registers % unit or not least <= registers <= most:
            expected = f"multiples of {unit} from {least} to {most}"
            refuse(f"{of}.registers", blocks.registers, expected, "Use the numbers of a row of blocks.toml.")
    of_consumer, of_producer = blocks.registers
    warpgroups = blocks.warpgroups
    # What they give back and take is what the launch has given each: as many as fit, in whole units.
    most = limits["register_file"] // warpgroups // unit * unit * warpgroups
    total = of_consumer * blocks.computing + of_producer * (warpgroups - blocks.computing)
    if total > most:
        got = f"{blocks.registers} with {blocks.consumers} consumers, {total} in all"
        refuse(f"{of}.registers", got, f"at most {most} in all", "Give each consumer fewer registers.")
