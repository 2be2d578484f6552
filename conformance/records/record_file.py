"""Records as files: JSON that is byte-deterministic but for `environment`, and journals of unfinished runs.

For the same kernels, cases and device a record has the same bytes: results are sorted, floats are written
by `repr`, and neither times nor paths appear.
"""

import json
import os
from pathlib import Path

from attest.conformance.files import read_bytes, write_text
from attest.conformance.record import RunRecord
from attest.conformance.records.baseline_file import is_baseline, read_baseline
from attest.conformance.records.journal import is_journal, journal_path, read_journal
from attest.conformance.records.schema import record_from_json, record_to_json
from attest.conformance.sizes import sizes


def write_record(record: RunRecord, path: Path) -> None:
    """Write a record whole or not at all, so that a crash leaves the previous one. Raises FileError."""
    write_text(path, record_text(record))


def record_text(record: RunRecord) -> str:
    """Return the text of a record's file."""
    return json.dumps(record_to_json(record), indent=1, sort_keys=True, allow_nan=False) + "\n"


def read_record(path: Path) -> RunRecord:
    """Read a record, a baseline, or a journal as the partial record of the run that wrote it.

    Raises ValueError with one sentence naming the file and what is wrong with it.
    """
    journal = journal_path(path)
    if os.path.exists(journal) and not os.path.exists(path):  # pathlib raises for names that are too long
        raise ValueError(
            f"{path}: not a readable record: its run has not finished; {journal} has what it found"
        )
    data = read_bytes(path, sizes().record_bytes, "record")
    if is_journal(data):
        return read_journal(data, str(path))
    return read_baseline(data, str(path)) if is_baseline(data) else record_from_json(data, str(path))
