"""Tables of block sizes: one format and one selector for all implementations.

A table is a file `blocks.toml` beside the kernels: the name of the `implementation`, and a list `sizes` of
rows. These columns select a row; one that is absent fits every call:

- kernel: its name;
- head_dim: fits head dims up to this one; over: and above this one;
- value_dim: fits head dims of value up to this one; value_over: and above this one;
- bytes: of an element of query, key and value;
- devices: fits these devices, such as "sm_90";
- any: kinds of work, of which the call has at least one;
- all: kinds of work, of which the call has every one;
- only: kinds of work, of which the call has every one, and no others.

The column `measured` tells where a row comes from. All other columns are block sizes and schedule. The first
row that fits is taken, so specific rows come first. The rows of the files that the variable ATTEST_BLOCKS
names come before those of `blocks.toml`: see `attest.kernels.configs.own_tables`.
"""

import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from attest.kernels.configs.own_tables import own_rows

SELECTING = frozenset(
    ("kernel", "head_dim", "over", "value_dim", "value_over", "bytes", "devices", "any", "all", "only")
)
# All columns but those of block sizes and schedule.
_ABOUT = SELECTING | {"measured"}


@cache
def read_table(path: Path) -> Mapping[str, Any]:
    """Return the lists of a table by name, `sizes` among them."""
    return tomllib.loads(path.read_text())


def all_rows(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the rows of a table, those of the user's own tables first.

    Raises: ValueError for a file of ATTEST_BLOCKS that is no table.
    """
    table = read_table(path)
    return (*own_rows(table.get("implementation")), *table["sizes"])


def select(
    path: Path,
    kernel: str,
    head_dim: int,
    work: Collection[str] = (),
    itemsize: int | None = None,
    device: str | None = None,
    value_dim: int | None = None,
) -> dict[str, Any]:
    """Return the block sizes and the schedule of the first row that fits a call.

    Raises: LookupError if no row does, naming what was looked for.
    """
    return select_all(path, kernel, head_dim, work, itemsize, device, value_dim)[0]


def select_all(
    path: Path,
    kernel: str,
    head_dim: int,
    work: Collection[str] = (),
    itemsize: int | None = None,
    device: str | None = None,
    value_dim: int | None = None,
) -> tuple[dict[str, Any], ...]:
    """Return the block sizes and the schedule of every row that fits a call, in the order of the table.

    Raises: LookupError if no row does, naming what was looked for. ValueError for a file of ATTEST_BLOCKS
    that is no table.
    """
    found = tuple(
        {name: value for name, value in row.items() if name not in _ABOUT}
        for row in all_rows(path)
        if _fits(row, kernel, head_dim, work, itemsize, device, value_dim)
    )
    if found:
        return found
    looked_for = [kernel, f"head_dim {head_dim}"]
    looked_for += [] if value_dim is None else [f"value_dim {value_dim}"]
    looked_for += [] if itemsize is None else [f"{itemsize} bytes"]
    looked_for += work
    raise LookupError(f"{path.name} has no row for {', '.join(looked_for)}")


def _fits(
    row: Mapping[str, Any],
    kernel: str,
    head_dim: int,
    work: Collection[str],
    itemsize: int | None = None,
    device: str | None = None,
    value_dim: int | None = None,
) -> bool:
    """Return whether a row applies to such a call."""
    return (
        row["kernel"] == kernel
        and row.get("over", -1) < head_dim <= row["head_dim"]
        and (value_dim is None or row.get("value_over", -1) < value_dim <= row.get("value_dim", value_dim))
        and row.get("bytes", itemsize) == itemsize
        and device in row.get("devices", (device,))
        and ("any" not in row or not set(row["any"]).isdisjoint(work))
        and set(row.get("all", ())) <= set(work)
        and set(row.get("only", work)) == set(work)
    )
