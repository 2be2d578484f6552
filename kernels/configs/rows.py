"""Rows of tables of block sizes: made of a measured configuration, and written into the text of a table."""

import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax

from attest.kernels.configs.tables import SELECTING

type Row = Mapping[str, Any]

_BEGIN, _END = "sizes = [", "]"
_LEAST_DIM = 16


def device_kind() -> str:
    """Return the device that calls run on by default, such as "cpu" or "TPU v5 lite"."""
    return jax.devices()[0].device_kind


def half(head_dim: int) -> int:
    """Return the `over` of a row that was measured at a head dim: half of the power of two that tiles have.

    A table with rows for head dims 64 and 128 thus has both, whatever their order; 0 up to head dim 16.
    """
    return 0 if head_dim <= _LEAST_DIM else 1 << (head_dim - 1).bit_length() - 1


def conditions(row: Row) -> tuple[Any, ...]:
    """Return the columns by which a row is selected, hashable."""
    values = {name: row[name] for name in sorted(SELECTING & row.keys())}
    return tuple(
        (name, tuple(sorted(map(str, x))) if isinstance(x, list | tuple) else x) for name, x in values.items()
    )


def new_table(implementation: str) -> str:
    """Return the text of a table without rows."""
    return (
        "# Block sizes that `attest tune --table` measured, in the format of kernels/configs/tables.py.\n"
        f"# ATTEST_BLOCKS loads this file; its rows come before those of attest.\n\n"
        f"implementation = {_value(implementation)}\n\n{_BEGIN}\n{_END}\n"
    )


def with_rows(text: str, rows: Iterable[Row]) -> str:
    """Return the text of a table with rows at its top, in place of those with equal conditions.

    The rest of the text is kept as it is.

    Raises: ValueError for a text without a line `sizes = [`.
    """
    lines = text.splitlines()
    if _BEGIN not in lines:
        raise ValueError(f"a table of block sizes has a line {_BEGIN!r}, and this one has none")
    start = lines.index(_BEGIN) + 1
    end = next((i for i in range(start, len(lines)) if lines[i] == _END), len(lines))
    new = {conditions(row): row for row in rows}
    kept = [line for line in lines[start:end] if _conditions_of(line) not in new]
    return "\n".join([*lines[:start], *map(_line, new.values()), *kept, *lines[end:]]) + "\n"


def _conditions_of(line: str) -> tuple[Any, ...] | None:
    """Return the conditions of a line that is one row; None for any other line."""
    try:
        row = tomllib.loads(f"row = {line.strip().removesuffix(',')}")["row"]
    except ValueError:
        return None
    return conditions(row) if isinstance(row, dict) else None


def _line(row: Row) -> str:
    return f"  {_value(row)},"


def _value(x: Any) -> str:
    if isinstance(x, Mapping):
        return f"{{ {', '.join(f'{name} = {_value(y)}' for name, y in x.items())} }}"
    if isinstance(x, Collection) and not isinstance(x, str):
        return f"[{', '.join(map(_value, x))}]"
    # A string, a number or a boolean of JSON is one of TOML.
    return json.dumps(x, ensure_ascii=False)
