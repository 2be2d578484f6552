"""A history as text and as JSON."""

import json
import math
from typing import Any

from rich.console import Console

from attest.conformance.record import Verdict
from attest.conformance.text import plural, printable
from attest.reports.history import STATISTICS, History
from attest.reports.render.terminal import plain
from attest.reports.words import one_line

SCHEMA = "attest.history/1"
_COMMIT = 12  # characters


def print_history(found: History, console: Console) -> None:
    """Print each record with what changed in it, then each series that changed, and last how much changed."""
    for index, entry in enumerate(found.entries):
        commit = f", commit {entry.commit[:_COMMIT]}" if entry.commit else ""
        style = "green" if entry.record.status == "pass" else "bold red"
        plain(console, f"{one_line(entry.label)}{commit}: {entry.record.status}, {entry.summary}", style)
        for words in found.changes_in(index):
            plain(console, f"  {one_line(words, 400)}")
    series = found.series()
    if series:
        console.print()
        plain(console, "What changed, in each record from the first to the last:")
        for words in series:
            plain(console, f"  {printable(words)}")
        console.print()
    worse = sum(change.worse for change in found.changes)
    counted = plural(len(found.changes), "change of a number", "changes of numbers")
    plain(console, f"{plural(len(found.entries), 'record')}: {counted}, {worse} for the worse")


def render_json(found: History) -> str:
    """Return the history as JSON; numbers that are not finite are the texts "inf" and "nan"."""
    data = {
        "schema": SCHEMA,
        "records": [
            {
                "label": printable(entry.label),
                "commit": entry.commit,
                "status": entry.record.status,
                "counts": entry.record.counts,
                "verdicts": [
                    {
                        **dict(zip(("subject", "check", "dtype"), place, strict=True)),
                        **{verdict.value: counts[verdict] for verdict in Verdict if verdict in counts},
                    }
                    for place, counts in sorted(found.verdicts[index].items())
                ],
                "changes": [printable(words) for words in found.changes_in(index)],
                "numbers": [
                    {
                        **dict(zip(("subject", "check", "dtype", "output"), key, strict=True)),
                        **{name: _finite(getattr(spread, name)) for name in STATISTICS},
                    }
                    for key, spread in sorted(found.numbers[index].items())
                ],
            }
            for index, entry in enumerate(found.entries)
        ],
        "changes": [
            {
                **dict(zip(("subject", "check", "dtype", "output"), change.key, strict=True)),
                "statistic": change.statistic,
                "record": change.index,
                "since": change.since,
                "before": _finite(change.before),
                "after": _finite(change.after),
                "worse": change.worse,
            }
            for change in found.changes
        ],
    }
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _finite(value: Any) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
