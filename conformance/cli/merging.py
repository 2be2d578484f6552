"""The command `attest merge`: the record of all the shards of one run."""

from collections.abc import Sequence
from pathlib import Path

from attest.conformance.cli.judging import complained, conclude
from attest.conformance.cli.options import FAILED, Outputs, as_usage_errors
from attest.conformance.cli.reporting import refuse_reports, show_summary
from attest.conformance.record import merge_records, with_problems
from attest.conformance.records.lines import RecordLines, open_lines
from attest.conformance.records.merging import merge_lines
from attest.conformance.records.record_file import has_lines, write_lines
from attest.conformance.running.expectations import Expectation, Matches, load_expectations
from attest.conformance.running.gate import policy_problems, with_policy
from attest.conformance.sizes import sizes


def merge_files(
    records: Sequence[Path], expectations: Sequence[Path], outputs: Outputs, verbose: bool
) -> int:
    """Merge the records of all shards and conclude; return the exit status. Raises UsageError.

    If they have more results than a report shows whole, and these are to be written as lines, only one line
    of each shard and what failed is in memory.
    """
    with as_usage_errors():
        known = load_expectations(expectations)
        parts = [open_lines(path) for path in records]
        count = sum(part.count for part in parts)
        if count > sizes().shown_results and outputs.json is not None and has_lines(outputs.json):
            refuse_reports(outputs, count)
            return _merge_by_lines(parts, known, outputs, verbose)
        merged = with_policy(merge_records([part.whole() for part in parts]), known)
    return conclude(merged, outputs, verbose=verbose)


def _merge_by_lines(
    parts: Sequence[RecordLines], known: Sequence[Expectation], outputs: Outputs, verbose: bool
) -> int:
    from attest.reports.summary import summarise_lines

    assert outputs.json is not None
    matches = Matches(known)
    merged = merge_lines(parts, matches.concern, matches.add)
    header = merged.header
    problems = policy_problems(header.profile, matches, merged.verdicts) if header.whole else ()
    header = with_problems(header, problems, judged=merged.count)
    write_lines(merged.lines(header), outputs.json)
    summary = summarise_lines(open_lines(outputs.json))
    status = show_summary(summary, outputs.markdown, printed=True, verbose=verbose)
    if not header.complete:
        return complained(f"{header.note}; the results so far are in {outputs.json}", FAILED)
    return status if summary.of.status == "pass" else FAILED
