"""Adds records to a store: one Parquet file a run in each of two folders, whole or not at all."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attest.conformance.files import FileError
from attest.conformance.record import RunRecord
from attest.conformance.records.record_file import record_text
from attest.conformance.store.columns import TABLES, columns
from attest.conformance.store.rows import row_of_run, rows_of_results

_DIGITS = 16  # of a hash, in the name of a run


def add(store: Path, record: RunRecord, day: datetime) -> str | None:
    """Add a run to a store, and return its name; None if the store has it already.

    The folder is made if it is not there. day: when the run was made, in UTC. Raises FileError with one
    sentence.
    """
    run = hashlib.sha256(record_text(record).encode()).hexdigest()[:_DIGITS]
    try:
        for table in TABLES:
            (store / table).mkdir(parents=True, exist_ok=True)
        # The row of the run comes last: without it, the rows of its results count for nothing.
        if _file(store, "runs", run).exists():
            return None
        _write(store, "results", run, rows_of_results(run, record))
        _write(store, "runs", run, [row_of_run(run, day, record)])
    except OSError as error:
        raise FileError(f"{store}: cannot be written: {error.strerror or error}") from error
    return run


def _file(store: Path, table: str, run: str) -> Path:
    return store / table / f"{run}.parquet"


def _write(store: Path, table: str, run: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows of a run, whole or not at all."""
    import duckdb

    kinds = {name: kind for name, (kind, _words) in columns(table).items()}
    # In the store itself: a file can be moved only within a file system.
    with TemporaryDirectory(dir=store) as folder:
        lines, file = Path(folder) / "rows.json", Path(folder) / "rows.parquet"
        with lines.open("w", encoding="utf-8") as out:
            out.writelines(f"{json.dumps(row)}\n" for row in rows)
        named = ", ".join(f"'{name}': '{kind}'" for name, kind in kinds.items())
        read = f"read_json('{_quoted(lines)}', format='newline_delimited', columns={{{named}}})"
        with duckdb.connect() as connection:
            connection.execute(
                f"COPY (SELECT * FROM {read}) TO '{_quoted(file)}' (FORMAT parquet, COMPRESSION zstd)"
            )
        os.replace(file, _file(store, table, run))


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
