"""The HTML page of a comparison: one file that loads nothing, with what changed and nothing else."""

from attest.reports.comparison import Comparison
from attest.reports.pairing import Fate
from attest.reports.render.html import TOPS
from attest.reports.render.template import SIZE_LIMIT, fill
from attest.reports.rows import ALL, Row, main_rows
from attest.reports.spread import STATISTICS
from attest.reports.summary import options_of
from attest.reports.words import LEGEND, changed_settings, number

# The fates of changed verdicts, each with its title and whether its table is folded.
_CHANGED = (
    ((Fate.BROKEN, Fate.LOST), "Became worse", False),
    ((Fate.TIMED_OUT,), "Timed out", False),
    ((Fate.FIXED,), "Fixed", True),
    ((Fate.CHANGED,), "Changed, neither better nor worse", True),
    ((Fate.NEW,), "New", True),
    ((Fate.GONE,), "Gone", True),
)

# Regressions before the others are folded.
_UNFOLDED = 6


def render_html(comparison: Comparison) -> str:
    """Return a comparison as one file of HTML that loads nothing, the same for the same records."""
    found = [(title, comparison.of_fate(*fates), folded) for fates, title, folded in _CHANGED]
    both = main_rows(comparison.rows)
    numbers = [row for row in both if _changes(row)]
    features = [row for row in comparison.rows if row.feature != ALL and _changes(row)]
    text = ""
    for top in TOPS:
        text = fill(
            "comparison.html.j2",
            comparison=comparison,
            options=(options_of(comparison.base.run), options_of(comparison.head.run)),
            settings=changed_settings(comparison.base.run, comparison.head.run),
            numbers=numbers,
            unchanged=len(both) - len(numbers),
            features=sorted(features, key=lambda row: (-row.severity, row.key)),
            changed=[each for each in found if each[1]],
            statistics=STATISTICS,
            legend=LEGEND,
            share=_share,
            first=min(_UNFOLDED, top),
            top=top,
        ).lstrip()
        if len(text.encode()) < SIZE_LIMIT:
            break
    return text


def _changes(row: Row) -> bool:
    """Return whether a statistic that both runs have changed, as the page writes it."""
    base, head = row.base, row.head
    if base is None or head is None:
        return False
    return any(number(getattr(base, name)) != number(getattr(head, name)) for name in STATISTICS)


def _share(value: float | None, most: float, width: int) -> int:
    """Return the length of a bar: `width` for `most`, and for whatever is larger."""
    if value is None:
        return 0
    return round(width * value / most) if value < most else width
