"""The last lines of a run on a terminal: the slowest parts, what was judged, what was skipped and why."""

from collections import defaultdict
from collections.abc import Iterable

from attest.conformance.record import RunRecord, Verdict
from attest.conformance.text import plural
from attest.reports.summary import Summary
from attest.reports.words import one_line, setting

_SLOWEST = 5
# The lines of what was skipped, where `-v` does not ask for all of them.
_SKIPPED = 6


def closing(summary: Summary, verbose: bool) -> list[str]:
    """Return the lines before the verdict of a run."""
    lines = [*_slowest(summary)] if verbose else []
    inconclusive = summary.of.counts[Verdict.INCONCLUSIVE]
    if inconclusive:
        why = "not counted as passed, since the case could not have shown a defect"
        lines.append(f"{inconclusive} INCONCLUSIVE: {why}")
    if summary.of.results:
        lines.append(f"judged: {_judged(summary)}")
    run = summary.of.run
    skipped = [f"skipped: {one_line(text)}" for text in (*_not_here(run), *run.left_out)]
    shown = len(skipped) if verbose else _SKIPPED
    lines += skipped[:shown]
    if skipped[shown:]:
        lines.append(f"skipped: {len(skipped) - shown} more, which -v lists")
    return lines


def _judged(summary: Summary) -> str:
    """Return how much a run judged, and in which time if that is known."""
    subjects = plural(len({tally.subject for tally in summary.tallies}), "subject")
    checks = plural(len({tally.check for tally in summary.tallies}), "check")
    seconds = summary.of.run.seconds
    time = f" in {seconds:.1f} s" if seconds else ""
    return f"{plural(summary.cases, 'case')} of {subjects} by {checks}{time}"


def _not_here(record: RunRecord) -> Iterable[str]:
    """Yield the subjects that cannot run on the machine, one text for each reason."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in setting(record, "skipped").items():
        reasons[str(reason)].append(str(name))
    for reason, names in sorted(reasons.items()):
        yield f"{', '.join(sorted(names))}: {reason}"


def _slowest(summary: Summary) -> Iterable[str]:
    """Yield the checks and the features that took the longest; nothing if no times are known."""
    checks: defaultdict[str, float] = defaultdict(float)
    for (_, check), seconds in summary.seconds.items():
        checks[check] += seconds
    for noun, totals in (("checks", checks), ("features", summary.feature_seconds)):
        longest = sorted(totals.items(), key=lambda item: (-item[1], item[0]))[:_SLOWEST]
        words = [f"{name} {seconds:.1f} s" for name, seconds in longest if seconds]
        if words:
            yield f"slowest {noun}: {', '.join(words)}"
