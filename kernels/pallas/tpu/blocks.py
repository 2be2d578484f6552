"""Block sizes of the TPU kernels: the data table blocks.toml, and the lengths of the call."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attest.kernels.options import check_size, refuse

# Queries lie along the 128 lanes of a vector register. Keys do so in tiles of a mask or bias, and lie along
# sublanes, of which 16-bit numbers fill 16, everywhere else.
LANES = 128
# Any multiple is a tile: of eight sublanes, and of the four keys that share a call of dropout's generator.
SMALLEST = 8


@dataclass(frozen=True)
class BlockSizes:
    """How one kernel is cut: q query rows and k keys a tile, multiples of 8.

    A TPU takes only multiples of 128; the interpreter takes all. Results do not depend on it beyond rounding
    (clause S18).
    """

    q: int = 512
    k: int = 512

    def __post_init__(self) -> None:
        for name in ("q", "k"):
            size = check_size(f"BlockSizes.{name}", getattr(self, name))
            if size % SMALLEST:
                refuse(f"BlockSizes.{name}", size, f"a multiple of {SMALLEST}", "Round it up.")


@dataclass(frozen=True)
class BackwardSizes:
    """Block sizes of the three backward kernels; None lets the table choose that one."""

    query: BlockSizes | None = None
    key: BlockSizes | None = None
    bias: BlockSizes | None = None


def choose(kernel: str, head_dim: int, itemsize: int, q_length: int, k_length: int) -> BlockSizes:
    """The table's choice for a kernel, by name, for inputs of `itemsize` bytes, cut to what lengths need.

    The first row that fits is taken: its kernel and bytes are the same, and its head_dim is no smaller.
    """
    for row in _tables()["sizes"]:
        if row["kernel"] == kernel and row["bytes"] == itemsize and head_dim <= row["head_dim"]:
            return BlockSizes(_shrunk(row["q"], q_length), _shrunk(row["k"], k_length))
    raise LookupError(f"blocks.toml has no row for {kernel}, head_dim {head_dim}, {itemsize} bytes")


def _shrunk(block: int, length: int) -> int:
    return min(block, -(-length // LANES) * LANES)


@cache
def _tables() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("blocks.toml").read_text())
