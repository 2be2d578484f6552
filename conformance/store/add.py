"""Adds records to a store: one Parquet file a run in each of two folders, whole or not at all."""

import hashlib
import os
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from attest.conformance.files import FileError
from attest.conformance.records.lines import RecordLines
from attest.conformance.store.columns import TABLES, columns
from attest.conformance.store.rows import row_of_run, rows_of_results
from attest.conformance.store.schema import refuse_other_schemas, write_schema
from attest.conformance.store.sql import quoted

_DIGITS = 16  # of a hash, in the name of a run


def add(store: Path, lines: RecordLines, day: datetime) -> str | None:
    """Add a run to a store, and return its name; None if the store has it already.

    The folder is made if it is not there. day: when the run was made, in UTC. Raises FileError, and
    ValueError for a record that is broken and a store of another schema, with one sentence.
    """
    refuse_other_schemas(store)
    try:
        for table in TABLES:
            (store / table).mkdir(parents=True, exist_ok=True)
        write_schema(store)
        # In the store itself: a file can be moved only within a file system.
        with TemporaryDirectory(dir=store) as name:
            return _add(store, Path(name), lines, day)
    except OSError as error:
        raise FileError(f"{store}: cannot be written: {error.strerror or error}") from error


def _add(store: Path, scratch: Path, lines: RecordLines, day: datetime) -> str | None:
    of_run = row_of_run(lines)
    digest = hashlib.sha256(msgspec.json.encode(of_run))
    with (scratch / "results.json").open("wb") as out:
        for row in rows_of_results(lines):
            line = msgspec.json.encode(row)
            digest.update(line)
            out.write(line + b"\n")
    run = digest.hexdigest()[:_DIGITS]
    if (store / "runs" / f"{run}.parquet").exists():
        return None
    (scratch / "runs.json").write_bytes(msgspec.json.encode({**of_run, "day": f"{day:%Y-%m-%d %H:%M:%S}"}))
    # The row of the run comes last: without it, the rows of its results count for nothing.
    for table in ("results", "runs"):
        _convert(scratch, table, run)
        os.replace(scratch / f"{table}.parquet", store / table / f"{run}.parquet")
    return run


def _convert(scratch: Path, table: str, run: str) -> None:
    """Make the Parquet file of a table from its lines of JSON, with the name of the run in each row."""
    import duckdb

    kinds = ", ".join(
        f"'{name}': '{kind}'" for name, (kind, _words) in columns(table).items() if name != "run"
    )
    lines, file = (quoted(scratch / f"{table}.{ending}") for ending in ("json", "parquet"))
    rows = f"read_json({lines}, format='newline_delimited', columns={{{kinds}}})"
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (SELECT '{run}' AS run, * FROM {rows}) TO {file} (FORMAT parquet, COMPRESSION zstd)"
        )
