"""Block sizes, warps and stages of the Triton kernels: the data table blocks.toml."""

from dataclasses import asdict, dataclass
from pathlib import Path

from attest.kernels.call.options import refuse
from attest.kernels.configs.fields import check_fields, read_fields
from attest.kernels.configs.tables import read_table, select

_TABLE = Path(__file__).with_name("blocks.toml")
# The fields of `BlockSizes` for columns with other names.
_FIELDS = {"warps": "num_warps", "stages": "num_stages"}

# What `choose` calls work.
WORK = (
    *("plain", "edges", "short", "uneven", "few", "few_keys", "segments"),
    *("dropout", "mixed", "pairs", "bias", "rough"),
)


@dataclass(frozen=True)
class BlockSizes:
    """The cut and schedule of one kernel: q query rows and k keys a tile, warps a program, pipeline stages.

    q and k are powers of two of at least 16, and their product is limited, as Triton's compiler limits it.
    num_warps is a power of two. programs: how many programs of few queries a device runs at a time; where a
    call has fewer, its keys are cut into parts (`attest.kernels.triton.few_queries`). Results do not
    depend on any of it beyond rounding (clause S18).
    """

    q: int = 64
    k: int = 64
    num_warps: int = 4
    num_stages: int = 2
    programs: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        limits = read_table(_TABLE)["limits"]
        for name in ("q", "k"):
            size, least = getattr(self, name), limits["smallest_block"]
            if size < least or size & (size - 1):
                refuse(f"BlockSizes.{name}", size, f"a power of two of at least {least}", "Round it up.")
        if self.q * self.k > limits["pairs"]:
            got, expected = f"q * k = {self.q * self.k}", f"at most {limits['pairs']}, Triton's largest tile"
            refuse("BlockSizes.q and BlockSizes.k", got, expected, "Use smaller blocks.")
        if self.num_warps > limits["warps"] or self.num_warps & (self.num_warps - 1):
            expected = f"a power of two up to {limits['warps']}"
            refuse("BlockSizes.num_warps", self.num_warps, expected, "Use 4 or 8.")


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


def choose(kernel: str, device: str, head_dim: int, itemsize: int, work: str) -> BlockSizes:
    """Return the table's choice for a kernel, by name, on a device like "sm_90", by the inputs' `itemsize`.

    work: one of WORK, what a tile costs beside its products, which decides how large it may be before
    registers spill:

    - "plain": nothing; "edges": intervals of keys or a cap; "short": the same with a window, where loops are
      short; "uneven": cum_seqlens, or lengths that are no multiple of 128; "few": the same with at most 16
      queries; "few_keys": the same with at most 128 keys; "segments": segment ids;
    - "dropout": dropout; "mixed": two of dropout, segment ids and uneven lengths;
    - "pairs": a mask, or a bias that all rows share; "bias": a bias of every pair;
    - "rough": a mask or bias with another of these.

    Rows without devices come last in the table, as the fallback.
    """
    row = select(_TABLE, kernel, head_dim, (work,), itemsize, device)
    fields = {_FIELDS.get(name, name): x for name, x in row.items()}
    return read_fields(BlockSizes, f"block sizes of {kernel}", fields)


def columns(sizes: BlockSizes) -> dict[str, int]:
    """Return block sizes as the columns of a row."""
    names = {field: name for name, field in _FIELDS.items()}
    found = {names.get(field, field): x for field, x in asdict(sizes).items()}
    return {name: x for name, x in found.items() if (name, x) != ("programs", 1)}


def separate(head_dim: int, work: str) -> bool:
    """Return whether dkey and dvalue are summed by a launch each, since both sums leave too few registers."""
    rows = read_table(_TABLE)["separate"]
    return any(head_dim > row["over"] and work in row.get("any", (work,)) for row in rows)
