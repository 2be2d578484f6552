"""The user's own tables of block sizes: the files that the variable ATTEST_BLOCKS names.

A file has the format of `attest.kernels.configs.tables`, and `attest tune --table` writes such files. They
are read when the first block sizes are chosen.
"""

import os
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from attest.kernels.call.options import refuse, shown

VARIABLE = "ATTEST_BLOCKS"
_KERNELS = ("forward", "backward", "backward_query", "backward_key", "backward_bias")
_NUMBERS = ("head_dim", "over", "value_dim", "value_over", "bytes")
_LISTS = ("devices", "any", "all", "only")
_ADVICE = "Write it with attest tune --table."


def own_rows(implementation: str | None) -> tuple[Mapping[str, Any], ...]:
    """Return the rows of the user's tables for an implementation, in the order of the files.

    Raises: ValueError for a file that is no table.
    """
    given = os.environ.get(VARIABLE)
    return _by_implementation(given).get(implementation, ()) if given and implementation else ()


@cache
def _by_implementation(variable: str) -> Mapping[str, tuple[Mapping[str, Any], ...]]:
    """Return the rows of the files that the variable names, by implementation."""
    found: dict[str, tuple[Mapping[str, Any], ...]] = {}
    for name in filter(None, variable.split(os.pathsep)):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            refuse(VARIABLE, shown(name), f"a file that can be read ({error})", "Correct the path.")
        implementation, rows = checked_table(f"{VARIABLE}, {name}", text)
        found[implementation] = (*found.get(implementation, ()), *rows)
    return found


def checked_table(place: str, text: str) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """Return the implementation and the rows of the text of a table, checked by the columns that select them.

    Raises: ValueError that begins with `place`.
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(place, f"no TOML ({error})", "a table of block sizes", _ADVICE)
    implementation, rows = table.get("implementation"), table.get("sizes")
    if implementation not in _implementations():
        expected = f"one of {', '.join(_implementations())}"
        refuse(f"{place}, implementation", shown(implementation), expected, _ADVICE)
    if not isinstance(rows, list):
        refuse(f"{place}, sizes", shown(rows), "a list of rows", _ADVICE)
    for number, row in enumerate(rows):
        _check_row(f"{place}, sizes[{number}]", row)
    return implementation, tuple(rows)


@cache
def _implementations() -> tuple[str, ...]:
    """Return the implementations that have a table."""
    tables = Path(__file__).parents[1].rglob("blocks.toml")
    return tuple(sorted(tomllib.loads(path.read_text())["implementation"] for path in tables))


def _check_row(place: str, row: Any) -> None:
    if not isinstance(row, dict):
        refuse(place, shown(row), "a row of columns", _ADVICE)

    def wrong(name: str, expected: str) -> NoReturn:
        refuse(f"{place}, {name}", shown(row.get(name)), expected, _ADVICE)

    if row.get("kernel") not in _KERNELS:
        wrong("kernel", f"one of {', '.join(_KERNELS)}")
    if "head_dim" not in row:
        wrong("head_dim", "a number")
    for name in row.keys() & set(_NUMBERS):
        if not isinstance(row[name], int) or isinstance(row[name], bool) or row[name] < 0:
            wrong(name, "a number")
    for name in row.keys() & set(_LISTS):
        if not isinstance(row[name], list) or not all(isinstance(x, str) for x in row[name]):
            wrong(name, "a list of names")
