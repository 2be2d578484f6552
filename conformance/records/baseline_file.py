"""Baselines as files, `attest.baseline/1`: the lines of a record, without what varies between two runs."""

from attest.conformance.record import RunRecord
from attest.conformance.records.line_format import BASELINE, all_lines


def baseline_text(record: RunRecord) -> str:
    """Return a record as the text of a baseline's file; results are sorted."""
    return b"".join(all_lines(record, BASELINE)).decode()
