"""The last lines of a run on a terminal: the slowest parts, what was judged, what was skipped and why."""

from collections import defaultdict
from collections.abc import Iterable

from attest.conformance.record import RunRecord, Verdict
from attest.conformance.text import plural
from attest.reports.words import one_line, setting

_SLOWEST = 5
# The lines of what was skipped, where `-v` does not ask for all of them.
_SKIPPED = 6


def closing(record: RunRecord, verbose: bool) -> list[str]:
    """Return the lines before the verdict of a run."""
    lines = [*_slowest(record)] if verbose else []
    inconclusive = record.counts[Verdict.INCONCLUSIVE]
    if inconclusive:
        why = "not counted as passed, since the case could not have shown a defect"
        lines.append(f"{inconclusive} INCONCLUSIVE: {why}")
    if record.results:
        lines.append(f"judged: {_judged(record)}")
    skipped = [f"skipped: {one_line(text)}" for text in (*_not_here(record), *record.left_out)]
    shown = len(skipped) if verbose else _SKIPPED
    lines += skipped[:shown]
    if skipped[shown:]:
        lines.append(f"skipped: {len(skipped) - shown} more, which -v lists")
    return lines


def _judged(record: RunRecord) -> str:
    """Return how much a run judged, and in which time if that is known."""
    results = record.results
    cases = len({(result.subject, result.case.id) for result in results})
    subjects = plural(len({result.subject for result in results}), "subject")
    checks = plural(len({result.check for result in results}), "check")
    time = f" in {record.seconds:.1f} s" if record.seconds else ""
    return f"{plural(cases, 'case')} of {subjects} by {checks}{time}"


def _not_here(record: RunRecord) -> Iterable[str]:
    """Yield the subjects that cannot run on the machine, one text for each reason."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in setting(record, "skipped").items():
        reasons[str(reason)].append(str(name))
    for reason, names in sorted(reasons.items()):
        yield f"{', '.join(sorted(names))}: {reason}"


def _slowest(record: RunRecord) -> Iterable[str]:
    """Yield the checks and the features that took the longest; nothing if no times are known."""
    checks: defaultdict[str, float] = defaultdict(float)
    features: defaultdict[str, float] = defaultdict(float)
    for result in record.results:
        checks[result.check] += result.seconds
        for feature in result.case.features:
            features[feature] += result.seconds
    for noun, totals in (("checks", checks), ("features", features)):
        longest = sorted(totals.items(), key=lambda item: (-item[1], item[0]))[:_SLOWEST]
        words = [f"{name} {seconds:.1f} s" for name, seconds in longest if seconds]
        if words:
            yield f"slowest {noun}: {', '.join(words)}"
