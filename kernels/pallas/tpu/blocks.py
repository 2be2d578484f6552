"""Block sizes of the TPU kernels: the data table blocks.toml, and the lengths of the call."""

from dataclasses import dataclass
from pathlib import Path

from attest.kernels.call.options import refuse
from attest.kernels.configs.fields import check_fields, read_fields
from attest.kernels.configs.rows import device_kind
from attest.kernels.configs.tables import select

_TABLE = Path(__file__).with_name("blocks.toml")

# Queries lie along the 128 lanes of a vector register. Keys do so in tiles of a mask or bias, and lie along
# sublanes, of which 16-bit numbers fill 16, everywhere else.
LANES = 128
# Any multiple is a tile: of eight sublanes, and of the four keys that share a call of dropout's generator.
SMALLEST = 8


@dataclass(frozen=True)
class BlockSizes:
    """The cut of one kernel: q query rows and k keys a tile, multiples of 8.

    A TPU takes only multiples of 128; the interpreter takes all. Results do not depend on it beyond rounding
    (clause S18).
    """

    q: int = 512
    k: int = 512

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("q", "k"):
            size = getattr(self, name)
            if size % SMALLEST:
                refuse(f"BlockSizes.{name}", size, f"a multiple of {SMALLEST}", "Round it up.")


@dataclass(frozen=True)
class BackwardSizes:
    """Block sizes of the three backward kernels; None lets the table choose that one."""

    query: BlockSizes | None = None
    key: BlockSizes | None = None
    bias: BlockSizes | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Config:
    """The block sizes of a call; None lets the table choose. See `attest.kernels.config`."""

    forward: BlockSizes | None = None
    backward: BackwardSizes | None = None

    def __post_init__(self) -> None:
        check_fields(self)


def choose(kernel: str, head_dim: int, itemsize: int, q_length: int, k_length: int) -> BlockSizes:
    """Return the table's choice for a kernel, by name, for inputs of `itemsize` bytes, cut to the lengths."""
    row = select(_TABLE, kernel, head_dim, itemsize=itemsize, device=device_kind())
    return shrunk(read_fields(BlockSizes, f"block sizes of {kernel}", row), q_length, k_length)


def shrunk(sizes: BlockSizes, q_length: int, k_length: int) -> BlockSizes:
    """Return blocks no longer than whole lanes of the lengths."""
    lengths = (-(-length // LANES) * LANES for length in (q_length, k_length))
    return BlockSizes(*(min(size, length) for size, length in zip((sizes.q, sizes.k), lengths, strict=True)))
