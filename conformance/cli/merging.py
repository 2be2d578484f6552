"""The command `attest merge`: the record of all the shards of one run."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from attest.conformance.cli.console import print_text
from attest.conformance.cli.judging import complained, conclude
from attest.conformance.cli.options import FAILED, PASSED, Outputs, UsageError, as_usage_errors
from attest.conformance.judging.failure import explain
from attest.conformance.record import RunRecord, Verdict, merge_records, with_problems
from attest.conformance.records.lines import RecordLines, open_lines
from attest.conformance.records.merging import MergedLines, merge_lines
from attest.conformance.records.record_file import has_lines, write_lines
from attest.conformance.running.expectations import Expectation, Matches, load_expectations
from attest.conformance.running.gate import policy_problems, with_policy
from attest.conformance.sizes import sizes
from attest.conformance.text import plural

_LISTED = 20  # failures of a record that is not shown whole


def merge_files(
    records: Sequence[Path], expectations: Sequence[Path], outputs: Outputs, verbose: bool
) -> int:
    """Merge the records of all shards and conclude; return the exit status. Raises UsageError.

    If they have more results than are shown, and these are to be written as lines, only one line of each
    shard and what failed is in memory, and only what failed is printed.
    """
    with as_usage_errors():
        known = load_expectations(expectations)
        parts = [open_lines(path) for path in records]
        count = sum(part.count for part in parts)
        if count > sizes().shown_results and outputs.json is not None and has_lines(outputs.json):
            _refuse_reports(outputs, count)
            return _merge_by_lines(parts, known, outputs.json)
        merged = with_policy(merge_records([part.whole() for part in parts]), known)
    return conclude(merged, outputs, verbose=verbose)


def _refuse_reports(outputs: Outputs, count: int) -> None:
    for name, path in outputs.named:
        if name != "--json":
            shown = f"a report shows {sizes().shown_results} at most"
            raise UsageError(f"{name} {path}: there are {count} results, {shown}: give only --json")


def _merge_by_lines(parts: Sequence[RecordLines], known: Sequence[Expectation], path: Path) -> int:
    matches = Matches(known)
    merged = merge_lines(parts, matches.concern, matches.add)
    header = merged.header
    problems = policy_problems(header.profile, matches, merged.verdicts) if header.whole else ()
    header = with_problems(header, problems, judged=merged.count)
    write_lines(merged.lines(header), path)
    print_text(_summary(header, merged))
    if not header.complete:
        return complained(f"{header.note}; the results so far are in {path}", FAILED)
    return FAILED if header.problems or merged.failures else PASSED


def _summary(header: RunRecord, merged: MergedLines) -> str:
    """Return the first failures, those that a search found before others, the problems and the counts."""
    failures = sorted(merged.failures, key=lambda result: not result.minimal)
    blocks = [explain(result) for result in failures[:_LISTED]]
    blocks += [f"... and {len(failures) - _LISTED} more"] if len(failures) > _LISTED else []
    blocks += [f"problem: {problem}" for problem in header.problems]
    failed = bool(failures or header.problems)
    counts = sum((Counter(each) for each in merged.verdicts.values()), Counter[Verdict]())
    said = [plural(merged.count, "result"), *(f"{counts[v]} {v}" for v in Verdict if counts[v])]
    said += [plural(len(header.problems), "problem")] if header.problems else []
    outcome = "FAIL" if failed else "PASS" if header.complete else "INCOMPLETE"
    return "\n\n".join([*blocks, f"{outcome}: {', '.join(said)}"])
