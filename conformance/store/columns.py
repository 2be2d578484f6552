"""The columns of the tables of a store."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

TABLES = ("runs", "results")


@cache
def columns(table: str) -> Mapping[str, tuple[str, str]]:
    """Return the columns of a table by name: the type in DuckDB, and what it holds."""
    tables = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))
    return {name: (kind, words) for name, (kind, words) in tables[table].items()}
