"""Markdown of a run or of a change, which always fits one comment on a pull request."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attest.conformance.judging import failure
from attest.conformance.record import RunRecord
from attest.conformance.text import plural
from attest.reports.comparison import Comparison
from attest.reports.pairing import Fate
from attest.reports.render.template import fill, sections
from attest.reports.rows import ALL, main_rows
from attest.reports.spread import STATISTICS
from attest.reports.summary import Summary, options_of, summarise
from attest.reports.words import LEGEND, changed_settings, environment

# GitHub refuses comments of more than 65,536 characters; in bytes, so that no way of counting refuses ours.
SIZE_LIMIT = 60_000

# How many entries each list shows, the most that fit.
_TOPS = (50, 30, 20, 12, 8, 5, 3, 2, 1)

# The rows that a table of a run shows, and those above which it is folded.
_ROWS = 50
_LONG = 20
# The part of the size for the cards of causes.
_CARDS_SIZE = SIZE_LIMIT // 2

# The tables of a run in order, the first to be left out last, and their titles.
_TABLES = (
    ("verdicts", "verdicts"),
    ("timeouts", "what timed out"),
    ("known", "expected failures"),
    ("numbers", "numbers"),
    ("environment", "environment"),
)

# How many red results of a comparison are explained in full; the others are in its tables.
_EXPLAINED = 10
_SHIFTED = 3


@dataclass(frozen=True)
class Section:
    """One folded list. kind: pairs, rows, shifts or explained, which says how its items are written."""

    title: str
    kind: str
    noun: str
    entries: tuple[Any, ...]
    count: int


def render_run(record: RunRecord) -> str:
    """Return one run as `render_summary` does."""
    return render_summary(summarise(record))


def render_summary(summary: Summary) -> str:
    """Return one run: its verdict, a card for each cause, then its tables; whole sections are left out."""
    run = summary.of.run
    page = sections(
        "run.md.j2",
        summary=summary,
        options=options_of(run),
        tallies=sorted(summary.tallies, key=lambda tally: not tally.red),
        settings=list(environment(run).items()),
        statistics=STATISTICS,
        legend=LEGEND,
        top=_ROWS,
        long=_LONG,
    )
    parts = [("", page.opening()), *_cards(page, summary)]
    parts += [(title, getattr(page, name)()) for name, title in _TABLES]
    return _cut([(title, _tidy(text)) for title, text in parts])


def _cards(page: Any, summary: Summary) -> list[tuple[str, str]]:
    """Return the title and text of the cards that leave room for tables, and of a line for the others."""
    shown: list[tuple[str, str]] = []
    size = 0
    for card in summary.cards:
        text = page.cause(card)
        size += len(text.encode())
        if shown and size > _CARDS_SIZE:
            left = plural(len(summary.cards) - len(shown), "cause")
            return [*shown, ("", f"… and {left} more: see the HTML report.")]
        shown.append((f"cause {card.number}", text))
    return shown


def _cut(parts: Sequence[tuple[str, str]]) -> str:
    """Join titled texts; leave out the last of them until the rest is small enough, and say which."""
    kept = [(title, text) for title, text in parts if text]
    left_out: list[str] = []
    while True:
        note = f"Left out, to fit a comment: {', '.join(left_out)}." if left_out else ""
        whole = "\n\n".join([*(text for _, text in kept), *([note] if note else [])]) + "\n"
        if len(whole.encode()) < SIZE_LIMIT or len(kept) == 1:
            return whole
        title, _ = kept.pop()
        left_out[:0] = [title] if title else []


def _tidy(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def render_comparison(comparison: Comparison) -> str:
    """Return a change: one sentence, verdicts and numbers before and after, then what is folded away."""
    verdicts = (*comparison.of_fate(Fate.BROKEN), *comparison.of_fate(Fate.LOST))
    numbers = main_rows(comparison.rows)
    folded = _sections(comparison)
    return _fitting(
        lambda top: fill(
            "comparison.md.j2",
            comparison=comparison,
            options=(options_of(comparison.base.run), options_of(comparison.head.run)),
            settings=changed_settings(comparison.base.run, comparison.head.run),
            verdicts=verdicts,
            timeouts=comparison.of_fate(Fate.TIMED_OUT),
            main_rows=numbers,
            sections=folded,
            statistics=STATISTICS,
            legend=LEGEND,
            top=top,
        )
    )


def _sections(comparison: Comparison) -> list[Section]:
    broken = {pair.key: pair.result for pair in comparison.of_fate(Fate.BROKEN)}
    shifted = {shift.pair.key: shift.pair.result for shift in comparison.shifts}
    # By key: results with a number that is NaN are not equal to themselves, once they were read anew.
    worst = [*broken.values()][:_EXPLAINED]
    worst += [result for key, result in [*shifted.items()][:_SHIFTED] if key not in broken]
    explained = tuple(failure.explain(result) for result in worst)
    features = tuple(row for row in comparison.rows if row.base and row.head and row.feature != ALL)
    by_severity = tuple(sorted(features, key=lambda row: (-row.severity, row.key)))
    sections = [
        _section("Explained: new failures, and the largest changes of numbers", "explained", "", explained),
        _section("Case by case: numbers that became worse", "shifts", "number", comparison.shifts),
        _section("Numbers by feature", "rows", "row", by_severity),
    ]
    fates = (
        (Fate.FIXED, "Fixed"),
        (Fate.CHANGED, "Changed, neither better nor worse"),
        (Fate.NEW, "New"),
        (Fate.GONE, "Gone"),
    )
    for fate, title in fates:
        sections.append(_section(title, "pairs", "case", comparison.of_fate(fate)))
    return sections


def _section(title: str, kind: str, noun: str, items: tuple[Any, ...]) -> Section:
    return Section(title, kind, noun, items, len(items))


def _fitting(render: Callable[[int], str]) -> str:
    """Return the fullest of several renderings that is small enough."""
    text = ""
    for top in _TOPS:
        text = _tidy(render(top)) + "\n"
        if len(text.encode()) < SIZE_LIMIT:
            break
    return text
