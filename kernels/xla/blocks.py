"""Chunk sizes of the XLA kernels."""

from dataclasses import dataclass

from attest.kernels.configs.fields import check_fields


@dataclass(frozen=True)
class ChunkSizes:
    """The number of query rows and key rows of one tile; larger than a length means the whole length.

    Results do not depend on it beyond rounding (clause S18). Temporary memory grows with heads * q * k.
    """

    q: int = 256
    k: int = 256

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Config:
    """The block sizes of a call; None lets the kernels choose. See `attest.kernels.config`."""

    forward: ChunkSizes | None = None
    backward: ChunkSizes | None = None

    def __post_init__(self) -> None:
        check_fields(self)
