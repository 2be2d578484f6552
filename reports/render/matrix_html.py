"""The page of the matrix: one file that loads nothing, with the state of each cell and its evidence."""

import re
from dataclasses import dataclass

from attest.conformance.clauses import CLAUSES
from attest.conformance.judging.failure import describe_case, replay_line
from attest.conformance.record import Verdict
from attest.reports.matrix import Column, Matrix
from attest.reports.matrix_cells import Cell, Part, State, found_words, shows
from attest.reports.render.template import SIZE_LIMIT, fill, is_link

# A mark beside the words of a state.
MARKS = {
    State.FAILS: "✗",
    State.PASSES: "✓",
    State.INCONCLUSIVE: "?",
    State.NOT_SUPPORTED: "–",
    State.NOT_RUN: "○",
}
MEANINGS = {
    State.FAILS: "a result breaks the clause. Known: each such failure is an expected one, with a link",
    State.PASSES: "results show that the clause holds, and none breaks it",
    State.INCONCLUSIVE: "there are results, and none shows whether the clause holds",
    State.NOT_SUPPORTED: "the implementation does not declare the clause",
    State.NOT_RUN: "the clause is declared, and nothing was run for it",
}


@dataclass(frozen=True)
class Shown:
    """A part of a cell in words, and as a class of the style sheet."""

    state: State
    words: str
    mark: str
    css: str


def render_html(matrix: Matrix) -> str:
    """Return the matrix as one file of HTML that loads nothing, byte for byte the same for the same input.

    Links to pages are relative to the folder docs. If the page were too large, the commands of cells whose
    clauses hold are left out.
    """
    text = ""
    for every in (True, False):
        text = fill(
            "matrix.html.j2",
            matrix=matrix,
            clauses=CLAUSES,
            suites=matrix.suites,
            states={state.value: (MARKS[state], MEANINGS[state]) for state in State},
            shown=shown,
            counts=counts,
            case_words=describe_case,
            replay=lambda cell, every=every: _replay(cell, every),
            address=address,
            parted=parted,
            found_words=found_words,
            worse=worse,
        ).lstrip()
        if len(text.encode()) < SIZE_LIMIT:
            break
    return text


def shown(clause: str, part: Part) -> Shown:
    """Return a part of a cell in words, such as "fails 3 of 120"."""
    words = part.state.value
    if part.state is State.FAILS:
        words += f" {part.broken} of {part.results}{', known' if part.known else ''}"
    elif part.state is State.PASSES:
        words += f" {sum(count for verdict, count in part.counts.items() if shows(clause, verdict))}"
    return Shown(part.state, words, MARKS[part.state], part.state.value.replace(" ", "-"))


def counts(part: Part) -> str:
    """Return how many results of each verdict a part has, in words."""
    said = [f"{part.counts[verdict]} {verdict}" for verdict in Verdict if verdict in part.counts]
    said += [f"{part.elsewhere} that fail by other clauses"] if part.elsewhere else []
    return ", ".join(said) or "no result"


def worse(column: Column, clause: str) -> str:
    """Return in what a cell is worse than in the version before, in words; "" if it is not."""
    dtypes = column.worse.get(clause, ())
    if not dtypes or column.previous is None:
        return ""
    named = ", ".join(dtype for dtype in dtypes if dtype)
    return f"worse than {column.previous.of.version}{f' in {named}' if named else ''}"


def parted(name: str) -> list[str]:
    """Return a dotted name in the parts between which a line may break."""
    return re.findall(r"[^._]*[._]?", name)[:-1]


def address(link: str) -> str:
    """Return the address of an expectation's link on the site of the pages; "" for other texts."""
    if is_link(link):
        return link
    page = re.fullmatch(r"docs/([\w./-]+?)(?:/index)?\.md(#[\w.-]+)?", link)
    return f"{page[1]}/{page[2] or ''}" if page is not None and ".." not in page[1] else ""


def _replay(cell: Cell, every: bool) -> str:
    if cell.evidence is None or (cell.whole.state is not State.FAILS and not every):
        return ""
    return replay_line(cell.evidence)
