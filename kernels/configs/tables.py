"""Tables of block sizes: one format and one selector for all implementations.

A table is a file `blocks.toml` beside the kernels, with a list `sizes` of rows. These columns select a row;
one that is absent fits every call:

- kernel: its name;
- head_dim: fits head dims up to this one;
- value_dim: fits head dims of value up to this one;
- bytes: of an element of query, key and value;
- devices: fits these devices, such as "sm_90";
- any: kinds of work, of which the call has at least one;
- all: kinds of work, of which the call has every one.

All other columns are block sizes and schedule. The first row that fits is taken, so specific rows come first.
"""

import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_SELECTING = frozenset({"kernel", "head_dim", "value_dim", "bytes", "devices", "any", "all"})


@cache
def read_table(path: Path) -> Mapping[str, Any]:
    """Return the lists of a table by name, `sizes` among them."""
    return tomllib.loads(path.read_text())


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

    Raises: LookupError if no row does, naming what was looked for.
    """
    found = tuple(
        {name: value for name, value in row.items() if name not in _SELECTING}
        for row in read_table(path)["sizes"]
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
        and head_dim <= row["head_dim"]
        and (value_dim is None or value_dim <= row.get("value_dim", value_dim))
        and row.get("bytes", itemsize) == itemsize
        and device in row.get("devices", (device,))
        and ("any" not in row or not set(row["any"]).isdisjoint(work))
        and set(row.get("all", ())) <= set(work)
    )
