"""The journal of a run: JSON lines beside the record, one for each result, as it is found.

The first line holds the request, each further one a result. A line is handed to the system at once, so that
a killed run keeps all results that it had found.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

from attest.conformance.files import FileError, open_regular
from attest.conformance.record import Result, RunRecord, settled
from attest.conformance.records.schema import (
    JOURNAL,
    result_from_json,
    result_to_json,
    run_from_json,
    run_to_json,
    schema_of,
)

_ENDING = ".journal"


def journal_path(record: Path) -> Path:
    """Return the path of the journal of a record, which exists during its run."""
    return Path(f"{record}{_ENDING}")


class Journal:
    """The file of one run, which starts with the run's request. Raises FileError if it cannot be created.

    sync_seconds: how long the disk may lag behind what was written. fault: a sentence about why a later
    line could not be written; the run then continues without its journal.
    """

    def __init__(self, path: Path, header: RunRecord, sync_seconds: float) -> None:
        self.path = path
        self.fault = ""
        self._given = self._kept = 0
        self._sync_seconds = sync_seconds
        self._synced = time.monotonic()
        try:
            self._file = _created(path)
            self._write(run_to_json(header))
        except OSError as error:
            raise FileError(self._sentence(error)) from error

    def add(self, results: Sequence[Result]) -> None:
        """Append results."""
        self._given += len(results)
        try:
            for result in results:
                if not self.fault:
                    self._write({"result": result_to_json(result)})
                    self._kept += 1
        except OSError as error:
            self.fault = self._sentence(error)

    @property
    def contents(self) -> str:
        """A clause about which results can be read from the file."""
        if self._kept == self._given:
            return f"the results are in {self.path}"
        return f"{self.path} has only the first {self._kept} of {self._given} results"

    def close(self) -> None:
        """Leave the file for `read_journal`."""
        self._file.close()

    def remove(self) -> None:
        """Remove the file: a record has replaced it, or nothing was found."""
        self.close()
        with suppress(OSError):
            self.path.unlink()

    def _write(self, data: dict[str, Any]) -> None:
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"
        line = text.encode()
        while line:
            line = line[self._file.write(line) :]
        if time.monotonic() - self._synced >= self._sync_seconds:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def _sentence(self, error: OSError) -> str:
        return f"{self.path}: cannot be written: {error.strerror or error}"


def is_journal(data: bytes) -> bool:
    """Return whether a file's bytes begin as a journal does."""
    try:
        return schema_of(data.partition(b"\n")[0], "") == JOURNAL
    except ValueError:
        return False


def read_journal(data: bytes, where: str) -> RunRecord:
    """Return the partial record that a journal's bytes hold.

    A last line without an end is left out: the run was killed while it wrote the line.
    Raises ValueError with one sentence for any other line that is broken.
    """
    first, *lines = data.split(b"\n")
    header = run_from_json(first, f"{where}: broken journal, line 1")
    results = [
        result_from_json(line, f"{where}: broken journal, line {number}")
        for number, line in enumerate(lines[:-1], start=2)
    ]
    note = f"the run was killed: {where} holds its {len(results)} results so far"
    return replace(header, results=settled(results), note=note)


def _created(path: Path) -> FileIO:
    """Create a file that no other run writes; replace one that a killed run left."""
    file = FileIO(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW), "a")
    try:
        _lock(file.fileno())
        file.truncate(0)
    except OSError:
        file.close()
        raise
    return file


def _lock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # without such locks, the user must keep two runs apart
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(error.errno, "another run is writing it") from error
