"""Runs and changes on a terminal: the counts, what is wrong, and the verdict in the last line."""

import textwrap
from collections import defaultdict
from itertools import chain
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from attest.conformance.judging import failure
from attest.conformance.record import RunRecord, Verdict
from attest.conformance.text import plural, printable
from attest.reports.comparison import Comparison
from attest.reports.pairing import Fate, Pair
from attest.reports.render.closing import closing
from attest.reports.rows import Row, main_rows
from attest.reports.spread import STATISTICS
from attest.reports.summary import Known, Summary, options_of, summarise
from attest.reports.words import family, number, one_line, recipe

_LISTED = 20
_STYLES = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.ERROR: "bold red",
    Verdict.TIMEOUT: "bold red",
    Verdict.XPASS: "bold red",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.XFAIL: "yellow",
    Verdict.UNSUPPORTED: "dim",
}


# The characters of the reason of an expected failure that are shown, however narrow the terminal is.
_REASON = 16

_COMMAND = "attest replay"


def print_run(record: RunRecord, console: Console, verbose: bool = False) -> None:
    """Print a run as `print_summary` does."""
    print_summary(summarise(record), console, verbose)


def print_summary(summary: Summary, console: Console, verbose: bool = False) -> None:
    """Print counts by subject and check, a card for each cause, expected failures, problems, the status.

    verbose: with each check of an expected failure, the slowest checks, and all that was skipped.
    """
    run = summary.of.run
    if summary.tallies:
        _print_tallies(summary, _seconds(summary), console)
    _print_causes(summary, console)
    _print_timeouts(summary, console)
    _print_known(summary, console, verbose)
    for problem in run.problems:
        console.print()
        _prose(console, f"problem: {problem}")
    console.print()
    for line in closing(summary, verbose):
        _prose(console, line)
    style = "green" if summary.of.status == "pass" else "bold red"
    _prose(console, f"{summary.headline} ({options_of(run)})", style)


def _print_causes(summary: Summary, console: Console) -> None:
    """Print a card for each cause."""
    for card in summary.cards:
        console.print()
        _prose(console, card.text)


def _print_timeouts(summary: Summary, console: Console) -> None:
    """Print timeouts apart from failures: the machine may have been too busy."""
    if summary.timeouts:
        console.print()
        plain(console, "Timed out, so neither right nor wrong:")
    for result in summary.timeouts[:_LISTED]:
        _prose(console, f"  {result.subject} {result.check}: {one_line(result.message)}")
        plain(console, f"    {failure.replay_line(result)}")
    _print_more(len(summary.timeouts), "case", console)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print notes, verdicts and numbers that became worse, and last whether anything regressed."""
    for note in comparison.notes:
        plain(console, f"note: {note}", "yellow")
    worse = comparison.of_fate(Fate.BROKEN) + comparison.of_fate(Fate.LOST)
    _print_pairs("Verdicts that became worse", worse, console)
    _print_pairs("Timed out", comparison.of_fate(Fate.TIMED_OUT), console)
    _print_pairs("Fixed", comparison.of_fate(Fate.FIXED), console)
    rows = main_rows(comparison.rows)
    if rows:
        console.print(_number_table(rows[:_LISTED]))
        _print_more(len(rows), "row", console)
    if comparison.regressions:
        console.print()
    for regression in comparison.regressions[:_LISTED]:
        plain(console, f"worse: {regression}")
    _print_more(len(comparison.regressions), "regression", console)
    for found in comparison.new_causes[:_LISTED]:
        console.print()
        plain(console, f"cause: {found.card.cause.subject}: {found.card.parts.headline} ({found.counts})")
        plain(console, f"  replay: {found.card.parts.replay}")
    _print_more(len(comparison.new_causes), "cause", console)
    console.print()
    style = "bold red" if comparison.regressed else "yellow" if comparison.head_failures else "green"
    plain(console, comparison.headline, style)


def plain(console: Console, text: str, style: str | None = None) -> None:
    """Print text as it is: nothing wrapped, nothing taken for markup, so that a line can be copied."""
    console.print(printable(text), style=style, soft_wrap=True, markup=False, highlight=False, emoji=False)


def _prose(console: Console, text: str, style: str | None = None) -> None:
    """Print text, on a terminal with lines broken between words; a line with a command stays whole."""
    lines = text.splitlines()
    if console.is_terminal:
        lines = [part for line in lines for part in _folded(line, console.width)]
    plain(console, "\n".join(lines), style)


def _folded(line: str, width: int) -> list[str]:
    """Return the parts of a line, those after the first further to the right."""
    if _COMMAND in line:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def _table(title: str | None, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _seconds(summary: Summary) -> dict[tuple[str, str], float]:
    """Return how long each family of checks took for each subject; nothing if the record does not say."""
    found: dict[tuple[str, str], float] = {}
    for (subject, check), seconds in summary.seconds.items():
        key = subject, family(check)
        found[key] = found.get(key, 0.0) + seconds
    return found if any(found.values()) else {}


def _print_tallies(summary: Summary, seconds: dict[tuple[str, str], float], console: Console) -> None:
    """Print a row for each family of checks: refusal.mask_shape and its like would fill the screen.

    A subject has a line of its own, so that its name takes no width from the counts and is never cut.
    """
    titles = ("check", *(verdict.value for verdict in summary.verdicts), *(("seconds",) if seconds else ()))
    families: dict[tuple[str, str], list[int]] = {}
    for tally in summary.tallies:
        totals = families.setdefault((tally.subject, family(tally.check)), [0] * len(summary.verdicts))
        totals[:] = [total + count for total, count in zip(totals, summary.cells(tally), strict=True)]
    rows: dict[str, list[tuple[str, ...]]] = {}
    for (subject, check), totals in families.items():
        cells = (
            f"[{_STYLES[verdict]}]{count}[/]" if count else "[dim].[/]"
            for verdict, count in zip(summary.verdicts, totals, strict=True)
        )
        time = (f"{seconds[subject, check]:.1f}",) if seconds else ()
        rows.setdefault(subject, []).append((f"  {_cell(check)}", *cells, *time))
    every = (titles, *chain.from_iterable(rows.values()))
    widths = [max(Text.from_markup(cell).cell_len for cell in column) for column in zip(*every, strict=True)]
    # The first table is the header of all the others, whose columns are as wide.
    for subject, of_subject in {None: [], **rows}.items():
        table = _table(None, titles[:1], titles[1:])
        table.show_header = subject is None
        for column, width in zip(table.columns, widths, strict=True):
            column.width = width
        for row in of_subject:
            table.add_row(*row)
        if subject is not None:
            plain(console, subject, "bold")
        console.print(table)


def _number_table(rows: tuple[Row, ...]) -> Table:
    heads = ("err/bound", "rms max", "rms median", "z", "bias t")
    table = _table("Numbers, before -> after", ("subject", "check", "dtype", "feature", "output"), heads)
    for row in rows:
        names = (row.subject, row.check, row.dtype, row.feature, row.output)
        table.add_row(*(_cell(name) for name in names), *(_change(row, name) for name in STATISTICS))
    return table


def _change(row: Row, statistic: str) -> str:
    before, after = (number(getattr(side, statistic)) for side in (row.base, row.head))
    text = before if before == after else f"{before} -> {after}"
    if statistic in row.worse:
        return f"[bold red]{text} worse[/]"
    return f"[green]{text}[/]" if statistic in row.better else text


def _print_known(summary: Summary, console: Console, verbose: bool) -> None:
    """Print a line for each cause of expected failures; if `verbose`, each check with a command."""
    if not summary.known:
        return
    console.print()
    if verbose:
        plain(console, "Expected failures:")
        for known in summary.known:
            cases = plural(known.cases, "case")
            what = f"{known.subject} {known.check}, {cases}: {_reason(known)} {known.link}"
            _prose(console, f"  {what}".rstrip())
            plain(console, f"    {failure.replay_line(known.example)}")
        return
    plain(console, "Expected failures, one line for each cause (-v: all, with commands):")
    causes: defaultdict[str, defaultdict[str, list[Known]]] = defaultdict(lambda: defaultdict(list))
    for known in summary.known:
        causes[known.subject][known.link or _reason(known)].append(known)
    for subject, found in causes.items():
        plain(console, f"  {one_line(subject)}")
        for group in found.values():
            plain(console, _cause(group, console.width if console.is_terminal else None))


def _cause(group: list[Known], width: int | None) -> str:
    """Return the line of known failures with one cause: how many, why, and the link; at most `width` long."""
    count = sum(known.cases for known in group)
    others = len({_reason(known) for known in group}) - 1
    more = f" (+{others} more)" if others else ""
    first, last = f"    {count:>4} ", f"{more} {group[0].link}".rstrip()
    room = None if width is None else max(width - len(first) - len(last), _REASON)
    reason = _reason(group[0])
    return f"{first}{reason if room is None else one_line(reason, room)}{last}"


def _reason(known: Known) -> str:
    return one_line(known.reason.removeprefix("expected: "))


def _print_pairs(title: str, pairs: tuple[Pair, ...], console: Console) -> None:
    if not pairs:
        return
    plain(console, f"{title}:")
    for pair in pairs[:_LISTED]:
        place = f"{pair.result.subject} {pair.result.check} {pair.case_id}"
        message = f": {one_line(pair.result.message)}" if pair.result.message else ""
        plain(console, f"  {pair.before} -> {pair.after}  {place}  {recipe(pair.result.case)}{message}")
    _print_more(len(pairs), "case", console)
    console.print()


def _print_more(count: int, noun: str, console: Console) -> None:
    if count > _LISTED:
        plain(console, f"  and {plural(count - _LISTED, noun)} more")


def _cell(text: Any) -> str:
    return escape(one_line(str(text)))
