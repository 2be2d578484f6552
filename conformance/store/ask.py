"""Queries of a store: the ready ones of queries.toml, and any in SQL."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attest.conformance.store.columns import TABLES, columns
from attest.conformance.store.schema import StoreError, refuse_other_schemas
from attest.conformance.store.sql import quoted
from attest.conformance.typed import convert


@dataclass(frozen=True)
class Query:
    """A ready query. words: what it finds. x, y, line: the columns of its plot; empty if it has none."""

    words: str
    sql: str
    x: str = ""
    y: str = ""
    line: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The rows that a query found, by column."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]

    def of(self, column: str) -> list[Any]:
        """Return the values of a column."""
        place = self.columns.index(column)
        return [row[place] for row in self.rows]


@cache
def queries() -> Mapping[str, Query]:
    """Return the ready queries by name."""
    tables = tomllib.loads(Path(__file__).with_name("queries.toml").read_text(encoding="utf-8"))
    return {name: convert(table, Query, f"queries.toml, {name}") for name, table in tables.items()}


def ask(store: Path, sql: str, subject: str = "*", output: str = "*") -> Answer:
    """Return what a query finds. subject, output: patterns with * and ?, where the query has them.

    Raises StoreError.
    """
    import duckdb

    refuse_other_schemas(store)
    for table in TABLES:
        if not any((store / table).glob("*.parquet")):
            raise StoreError(
                f"{store}: no store: it has no files {table}/*.parquet; `attest store add` makes one"
            )
    with duckdb.connect() as connection:
        try:
            for table in TABLES:
                connection.execute(f"CREATE VIEW {table} AS {_view(store, table)}")
            # Nothing but the store: a query of somebody else must not read other files.
            connection.execute(f"SET allowed_directories = [{quoted(store.resolve())}]")
            connection.execute("SET enable_external_access = false")
            given = {"subject": subject, "output": output}
            found = connection.execute(sql, {name: text for name, text in given.items() if f"${name}" in sql})
            names = tuple(each[0] for each in found.description or ())
            return Answer(names, found.fetchall())
        except duckdb.Error as error:
            raise StoreError(f"{store}: {str(error).partition(chr(10))[0]}") from error


def _view(store: Path, table: str) -> str:
    """Return the rows of a table, those of whole runs alone."""
    names = ", ".join(f'"{name}"' for name in columns(table))
    files = quoted(store.resolve() / table / "*.parquet")
    whole = "" if table == "runs" else " WHERE run IN (SELECT run FROM runs)"
    return f"SELECT {names} FROM read_parquet({files}, union_by_name = true){whole}"
