"""The option `--resume`: reads the journal of a run that was cut short."""

import os
from pathlib import Path

from attest.conformance.files import reason_of
from attest.conformance.record import RunRecord
from attest.conformance.records.journal import JOURNAL_ENDING, journal_path, read_calls
from attest.conformance.running.environment import FACTS, differing
from attest.conformance.running.resume import Before
from attest.conformance.text import sentence


def before(record: Path, request: RunRecord) -> Before:
    """Return the calls that a run had judged when it was cut short, from the journal beside its record.

    record: its path, or that of the journal. request: the record of the run that goes on, without results.
    Searches for simpler cases are left out: they are made again. Raises ValueError with one sentence if there
    is no journal, or if it is of another run.
    """
    path = record if record.name.endswith(JOURNAL_ENDING) else journal_path(record)
    if not os.path.exists(path):
        raise ValueError(
            f"{record}: there is no {path}, which a run with --json leaves if it is cut short: run it anew"
        )
    try:
        with path.open("rb") as file:
            was, calls = read_calls(file, str(path))
    except OSError as error:
        raise ValueError(sentence(f"{path}: not a readable journal: {reason_of(error)}")) from error
    differences = differing(vars(was), vars(request), ("profile", "seed", "shard", "narrowed"))
    differences += differing(was.environment, request.environment, (*FACTS, "block_sizes", "distributions"))
    if differences:
        raise ValueError(sentence(f"{path}: it is of another run: {'; '.join(differences)}"))
    return Before(tuple(call for call in calls if call.key))
