"""Adds records to a store: one Parquet file a run in each of two folders, whole or not at all."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from attest.conformance.files import FileError
from attest.conformance.record import RunRecord
from attest.conformance.store.columns import TABLES, columns
from attest.conformance.store.rows import row_of_run, rows_of_results

_DIGITS = 16  # of a hash, in the name of a run


def add(store: Path, record: RunRecord, day: datetime) -> str | None:
    """Add a run to a store, and return its name; None if the store has it already.

    The folder is made if it is not there. day: when the run was made, in UTC. Raises FileError with one
    sentence.
    """
    try:
        for table in TABLES:
            (store / table).mkdir(parents=True, exist_ok=True)
        # In the store itself: a file can be moved only within a file system.
        with TemporaryDirectory(dir=store) as name:
            return _add(store, Path(name), record, day)
    except OSError as error:
        raise FileError(f"{store}: cannot be written: {error.strerror or error}") from error


def _add(store: Path, scratch: Path, record: RunRecord, day: datetime) -> str | None:
    digest = hashlib.sha256(msgspec.json.encode(row_of_run(record)))
    _write(scratch / "results.json", rows_of_results(record), digest.update)
    run = digest.hexdigest()[:_DIGITS]
    if (store / "runs" / f"{run}.parquet").exists():
        return None
    _write(scratch / "runs.json", [{**row_of_run(record), "day": f"{day:%Y-%m-%d %H:%M:%S}"}])
    # The row of the run comes last: without it, the rows of its results count for nothing.
    for table in ("results", "runs"):
        _convert(scratch, table, run)
        os.replace(scratch / f"{table}.parquet", store / table / f"{run}.parquet")
    return run


def _write(
    path: Path, rows: Iterable[Mapping[str, Any]], seen: Callable[[bytes], object] = lambda _line: None
) -> None:
    """Write a line of JSON for each row; seen: called with each."""
    with path.open("wb") as out:
        for row in rows:
            line = msgspec.json.encode(row)
            seen(line)
            out.write(line + b"\n")


def _convert(scratch: Path, table: str, run: str) -> None:
    """Make the Parquet file of a table from its lines, with the name of the run in each row."""
    import duckdb

    kinds = ", ".join(
        f"'{name}': '{kind}'" for name, (kind, _words) in columns(table).items() if name != "run"
    )
    lines, file = (_quoted(scratch / f"{table}.{ending}") for ending in ("json", "parquet"))
    rows = f"read_json('{lines}', format='newline_delimited', columns={{{kinds}}})"
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (SELECT '{run}' AS run, * FROM {rows}) TO '{file}' (FORMAT parquet, COMPRESSION zstd)"
        )


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
