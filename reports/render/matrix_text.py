"""The matrix as text: a line for each column with its states, and what fails, clause by clause."""

from collections import Counter

from rich.console import Console

from attest.conformance.text import plural
from attest.reports.matrix import Column, Matrix
from attest.reports.matrix_cells import State
from attest.reports.render.terminal import plain
from attest.reports.words import number, one_line


def print_matrix(matrix: Matrix, console: Console) -> None:
    """Print each implementation with the clauses of each state, and what the columns have in common."""
    for column in matrix.columns:
        _print_column(column, matrix.aligned(column), console)
    suites = matrix.suites
    said = f"{plural(len(matrix.columns), 'column')}, {plural(len(suites), 'suite')}"
    plain(console, f"{said}: {'; '.join(suite.words for suite in suites)}")
    if matrix.not_run:
        plain(console, f"not run: {', '.join(subject.title for subject in matrix.not_run)}")


def _print_column(column: Column, aligned: bool, console: Console) -> None:
    of = column.of
    by_state: dict[State, list[str]] = {state: [] for state in State}
    for clause, cell in column.cells.items():
        by_state[cell.whole.state].append(clause + (" (known)" if cell.whole.known else ""))
    failing = bool(by_state[State.FAILS])
    suite = "" if aligned else f" [{column.suite.words}]"
    title = f"{of.name}, {of.release}, {of.place}, {column.date or 'no date'}{suite}"
    plain(console, one_line(title), "bold red" if failing else "green")
    for state, clauses in by_state.items():
        if clauses:
            plain(console, f"  {state.value}: {', '.join(clauses)}")
    worst = [(cell.worst.ratio, clause) for clause, cell in column.cells.items() if cell.worst is not None]
    if worst:
        ratio, clause = max(worst)
        plain(console, f"  largest err/bound: {number(ratio)}, of {clause}")
    if column.worse and column.previous is not None:
        plain(console, f"  worse than {column.previous.of.version}: {', '.join(column.worse)}", "bold red")
    verdicts = Counter(result.verdict.value for result in column.unattributed)
    if verdicts:
        plain(console, f"  of no clause: {', '.join(f'{n} {verdict}' for verdict, n in verdicts.items())}")
