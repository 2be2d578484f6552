"""Records as files: a JSON object or JSON lines, and journals of unfinished runs.

For the same kernels, cases and device a record has the same bytes, but for `environment` and `seconds`:
results are sorted, floats are written by `repr`, and no paths appear.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from attest.conformance.files import read_bytes, write_parts
from attest.conformance.record import RunRecord
from attest.conformance.records.gzipped import compressed, decompressed
from attest.conformance.records.journal import journal_path, read_journal
from attest.conformance.records.line_format import BASELINE, LINES, all_lines, read_lines
from attest.conformance.records.schema import (
    JOURNAL,
    record_from_json,
    record_to_json,
    schema_of_first_line,
)
from attest.conformance.sizes import sizes

_LINES_ENDING = ".jsonl"
_COMPRESSED_ENDING = ".jsonl.gz"

# How the names of files that may be records end.
ENDINGS = (".json", _LINES_ENDING, _COMPRESSED_ENDING)


def write_record(record: RunRecord, path: Path) -> None:
    """Write a record in the form that its file's name asks for: as lines, or as a JSON object.

    It is written whole or not at all, so that a crash leaves the previous one. Raises FileError.
    """
    if has_lines(path):
        write_lines(all_lines(record), path)
    else:
        write_parts(path, [record_text(record).encode()])


def has_lines(path: Path) -> bool:
    """Return whether the name of a file to write asks for a record as lines."""
    return path.name.endswith((_LINES_ENDING, _COMPRESSED_ENDING))


def write_lines(lines: Iterable[bytes], path: Path) -> None:
    """Write the lines of a record, compressed if the file's name asks for it. Raises FileError."""
    write_parts(path, compressed(lines) if path.name.endswith(_COMPRESSED_ENDING) else lines)


def record_text(record: RunRecord) -> str:
    """Return the text of a record's file."""
    return json.dumps(record_to_json(record), indent=1, sort_keys=True, allow_nan=False) + "\n"


def read_record(path: Path) -> RunRecord:
    """Read a record, a baseline, or a journal as the partial record of the run that wrote it.

    What it is depends on its content alone. Raises ValueError with one sentence naming the file and what is
    wrong with it.
    """
    journal = journal_path(path)
    if os.path.exists(journal) and not os.path.exists(path):  # pathlib raises for names that are too long
        raise ValueError(
            f"{path}: not a readable record: its run has not finished; {journal} has what it found"
        )
    limit = sizes().record_bytes
    data = decompressed(read_bytes(path, limit, "record"), limit, f"{path}: not a readable record")
    schema = schema_of_first_line(data)
    if schema == JOURNAL:
        return read_journal(data, str(path))
    return read_lines(data, str(path)) if schema in (BASELINE, LINES) else record_from_json(data, str(path))
