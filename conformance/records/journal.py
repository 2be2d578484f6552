"""The journal of a run: JSON lines beside the record, one for each call that was judged.

The first line holds the request. Each further one holds the key of a call in the plan, and its results; or
the results of a search for a simpler case. A line is handed to the system at once, so that a killed run keeps
all results that it had found, and another run can judge the rest.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from io import BufferedIOBase, BytesIO, FileIO
from itertools import count
from pathlib import Path
from typing import Any

from attest.conformance.files import FileError, open_regular, read_line, write_text
from attest.conformance.record import JudgedCall, Result, RunRecord, settled
from attest.conformance.records.schema import (
    journal_line,
    result_to_json,
    run_from_json,
    run_to_json,
)
from attest.conformance.sizes import sizes

JOURNAL_ENDING = ".journal"


def journal_path(record: Path) -> Path:
    """Return the path of the journal of a record, which exists until its run is complete."""
    return Path(f"{record}{JOURNAL_ENDING}")


class Journal:
    """The file of one run, which starts with the run's request. Raises FileError if it cannot be created.

    before: the calls that an earlier part of the run has judged. sync_seconds: how long the disk may lag
    behind what was written. fault: a sentence about why a later line could not be written; the run then
    continues without its journal.
    """

    def __init__(
        self, path: Path, header: RunRecord, sync_seconds: float, before: Sequence[JudgedCall] = ()
    ) -> None:
        self.path = path
        self.fault = ""
        self._given = self._kept = sum(len(call.results) for call in before)
        self._sync_seconds = sync_seconds
        self._synced = time.monotonic()
        start = [_line(run_to_json(header)), *(_line(_call_to_json(call)) for call in before)]
        try:
            self._file = _created(path, "".join(start))
        except OSError as error:
            raise FileError(self._sentence(error)) from error

    def add(self, results: Sequence[Result], key: str = "") -> None:
        """Append the results of one call. key: of the call, if it is of the plan."""
        self._given += len(results)
        if self.fault or not (results or key):
            return
        try:
            self._write(_line(_call_to_json(JudgedCall(key, tuple(results)))))
            self._kept += len(results)
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
        """Remove the file: the record of a complete run has replaced it, or nothing was found."""
        self.close()
        with suppress(OSError):
            self.path.unlink()

    def _write(self, text: str) -> None:
        line = text.encode()
        while line:
            line = line[self._file.write(line) :]
        if time.monotonic() - self._synced >= self._sync_seconds:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def _sentence(self, error: OSError) -> str:
        return f"{self.path}: cannot be written: {error.strerror or error}"


def read_journal(data: bytes, where: str) -> RunRecord:
    """Return the partial record that a journal's bytes hold.

    A last line without an end is left out: the run was killed while it wrote the line.
    Raises ValueError with one sentence for any other line that is broken.
    """
    header, calls = read_calls(BytesIO(data), where)
    results = [result for call in calls for result in call.results]
    note = f"the run was killed: {where} holds its {len(results)} results so far"
    return replace(header, results=settled(results), note=note)


def read_calls(file: BufferedIOBase, where: str) -> tuple[RunRecord, list[JudgedCall]]:
    """Return the request of a journal's run, and its calls in the order of their ends.

    One line at a time is in memory. Raises ValueError as `read_journal` does.
    """
    places = (f"{where}: broken journal, line {number}" for number in count(1))
    place = next(places)
    header = run_from_json(read_line(file, sizes().line_bytes, place), place)
    calls: list[JudgedCall] = []
    for place in places:
        line = read_line(file, sizes().line_bytes, place)
        if not line.endswith(b"\n"):  # the end of the file, or of what a killed run wrote
            break
        calls.append(JudgedCall(*journal_line(line, place)))
    return header, calls


def _call_to_json(call: JudgedCall) -> dict[str, Any]:
    return {"judged": call.key, "results": [result_to_json(result) for result in call.results]}


def _line(data: dict[str, Any]) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def _created(path: Path, start: str) -> FileIO:
    """Create a file that no other run writes, with its first lines; replace one that a killed run left."""
    with closing(_opened(path)):
        write_text(path, start)  # whole, so that the journal of the earlier part is there until then
    return _opened(path)


def _opened(path: Path) -> FileIO:
    """Open a file for what is added at its end. Raises OSError if another run writes it."""
    file = FileIO(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW), "a")
    try:
        _lock(file.fileno())
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
