"""Compares two runs, one check of a subject at a time.

Of what stayed the same only numbers are kept, so that records may be larger than the memory.
"""

from collections.abc import Iterable
from dataclasses import replace

from attest.conformance.record import RunRecord, Verdict
from attest.conformance.records.counted import CountedRun
from attest.conformance.records.lines import RecordLines
from attest.reports.comparison import Comparison
from attest.reports.found import Found, found_in, groups, of_results
from attest.reports.pairing import same_draw, unreached, with_other_blocks
from attest.reports.part import Terms, part_of


def compare_records(base: RunRecord, head: RunRecord) -> Comparison:
    """Compare the run before a change with the one after it."""
    runs = replace(base, results=()), replace(head, results=())
    return _compared(*runs, of_results(base.results), of_results(head.results))


def compare_lines(base: RecordLines, head: RecordLines) -> Comparison:
    """Compare two records as `compare_records` does, without holding their results in memory.

    Raises ValueError for a record that is broken.
    """
    return _compared(base.header, head.header, found_in(base), found_in(head))


def _compared(
    base: RunRecord, head: RunRecord, before: Iterable[Found], after: Iterable[Found]
) -> Comparison:
    """Compare two runs. before, after: their results, in order."""
    terms = Terms(same_draw(base, head), with_other_blocks(base, head))
    parts = [part_of(*group, terms) for group in groups(before, after)]
    hung = {(part.place[0], case) for part in parts for case in part.hung}
    parts = tuple(replace(part, pairs=unreached(part.pairs, hung)) for part in parts)
    sides = (
        CountedRun(base, {verdict: sum(part.counts[0][verdict] for part in parts) for verdict in Verdict}),
        CountedRun(head, {verdict: sum(part.counts[1][verdict] for part in parts) for verdict in Verdict}),
    )
    failing = {part.place[0] for part in parts if any(verdict.red for verdict in part.counts[1])}
    failed = (found.result for part in parts if part.place[0] in failing for found in part.evidence)
    return Comparison(*sides, parts, tuple(failed))
