"""What a page says of a run: all that the Markdown says, unabridged, with the spread of its numbers."""

from conformance import failure
from conformance.record import RunRecord
from reports.render.plots import plots
from reports.render.template import fill
from reports.spread import STATISTICS
from reports.summary import asked, summarise
from reports.words import LEGEND, environment


def render_run(record: RunRecord) -> str:
    """One run as one file of HTML that loads nothing, byte for byte the same for the same run."""
    summary = summarise(record)
    return fill(
        "run.html.j2",
        summary=summary,
        asked=asked(record),
        explained=[(result, failure.explain(result)) for result in summary.red],
        plots=plots(record),
        settings=environment(record),
        statistics=STATISTICS,
        legend=LEGEND,
    )
