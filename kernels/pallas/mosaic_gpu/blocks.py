"""Decides the block sizes and the schedule of the Hopper kernel: a data table, blocks.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROWS = 64  # the query rows of one product of a warpgroup: WGMMA's only choice


@dataclass(frozen=True)
class Blocks:
    """How the kernel is cut and scheduled; results depend on none of it beyond rounding (S18).

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
    def q(self) -> int:
        """The query rows of a program's tile."""
        return ROWS * self.consumers


def choose(head_dim: int, plain: bool) -> Blocks | None:
    """The table's choice; None where it has none for the head dim.

    plain: whether a tile costs nothing beside its products and its softmax, and all tiles are as long: then
    few programs that go on from tile to tile lose nothing to the longest.
    """
    for row in _table():
        if row["head_dim"] == head_dim and (plain or row.get("work") != "plain"):
            consumer, producer = row["registers"]
            return Blocks(
                k=row["k"],
                stages=row["stages"],
                consumers=row["consumers"],
                registers=(consumer, producer),
                partial_sums=row["partial_sums"],
                programs=row.get("programs"),
            )
    return None


def head_dims() -> tuple[int, ...]:
    """The head dims that the table has rows for."""
    return tuple(dict.fromkeys(row["head_dim"] for row in _table()))


@cache
def _table() -> list[dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("blocks.toml").read_text())["sizes"]
