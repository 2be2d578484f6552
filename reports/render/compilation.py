"""The compile matrix on a terminal: failures by name, then a row for each kernel."""

from collections import defaultdict

from rich.console import Console
from rich.table import Table

from attest.conformance.compiling.matrix import Matrix, Result
from attest.conformance.compiling.roofline import Estimate
from attest.conformance.text import plural
from attest.reports.render.terminal import plain
from attest.reports.words import one_line

_LISTED = 50
_WIDTH = 400
_MIB = 2**20


def print_matrix(matrix: Matrix, console: Console) -> None:
    """Print failing cells with their numbers, the worst of each kernel by device, estimates, the status."""
    failing = [result for result in matrix.results if result.faults]
    for result in sorted(failing, key=lambda result: str(result.cell))[:_LISTED]:
        words = f"FAIL {result.cell}: {'; '.join(result.faults)}{_configuration(result)}"
        plain(console, one_line(words, _WIDTH))
    if len(failing) > _LISTED:
        plain(console, f"and {len(failing) - _LISTED} more failing: --json FILE writes all of them")
    if failing:
        console.print()
    for compiler in sorted({result.cell.compiler for result in matrix.results}):
        console.print(_worst([result for result in matrix.results if result.cell.compiler == compiler]))
        console.print()
    plain(console, "Estimates, not measurements: lower bounds on time from the vendors' published peaks")
    console.print(_rooflines(matrix))
    console.print()
    for sentence in matrix.left_out:
        plain(console, sentence)
    options = " ".join(filter(None, (f"profile {matrix.profile}", matrix.narrowed)))
    counts = f"{plural(len(matrix.results), 'configuration')}, {plural(matrix.compilations, 'compilation')}"
    verdict = f"FAIL: {len(failing)} of" if failing else "PASS:"
    style = "bold red" if failing else "green"
    plain(console, f"{verdict} {counts} in {matrix.seconds:.0f} s ({options})", style)


def _configuration(result: Result) -> str:
    words = " ".join(f"{name}={value}" for name, value in result.configuration.items())
    return f" ({words})" if words else ""


def _worst(results: list[Result]) -> Table:
    """Return how many cells of a compiler compile by device and kernel, and the most that any takes."""
    rows: dict[tuple[str, str], list[Result]] = defaultdict(list)
    numbers: dict[str, None] = {}
    for result in results:
        rows[result.cell.target, result.cell.kernel].append(result)
        numbers |= dict.fromkeys(result.outcome.binary.taken if result.outcome.binary else ())
    table = _table(results[0].cell.compiler, "kernel")
    for name in ("compiled", *numbers):
        words = name.removesuffix("_bytes").removesuffix("_columns")
        table.add_column(words.replace("_", " "), justify="right")
    for names, of_row in sorted(rows.items()):
        binaries = [result.outcome.binary for result in of_row if result.outcome.binary is not None]
        compiled = _red(f"{len(binaries)}/{len(of_row)}", len(binaries) < len(of_row))
        most = (max((binary.taken[name] for binary in binaries), default=None) for name in numbers)
        limits = of_row[0].limits
        table.add_row(
            *names,
            compiled,
            *(_amount(name, taken, limits.get(name)) for name, taken in zip(numbers, most, strict=True)),
        )
    return table


def _amount(name: str, taken: int | None, limit: int | None) -> str:
    if taken is None:
        return "-"
    if name == "spill_bytes":
        return _red(f"{taken} B", taken > 0)
    if not name.endswith("_bytes"):
        return str(taken) if limit is None else _red(f"{taken}/{limit}", taken > limit)
    if limit is None:
        return f"{taken / _MIB:.1f} MiB" if taken >= _MIB else f"{taken} B"
    return _red(f"{taken / limit:.0%}", taken > limit)


def _rooflines(matrix: Matrix) -> Table:
    rows: dict[tuple[str, str, str], list[Estimate]] = defaultdict(list)
    for found in matrix.estimates:
        rows[found.target, found.which, found.dtype].append(found)
    table = _table("target", "pass", "dtype")
    for name in ("FLOP/byte", "at least", "bound by compute"):
        table.add_column(name, justify="right")
    for names, found in sorted(rows.items()):
        bounds = [estimate.bound for estimate in found if estimate.bound is not None]
        compute = sum(bound.by == "compute" for bound in bounds)
        table.add_row(
            *names,
            _range([estimate.work.intensity for estimate in found], 0),
            f"{_range([bound.seconds * 1e3 for bound in bounds], 3)} ms" if bounds else "no peak published",
            f"{compute}/{len(bounds)}" if bounds else "-",
        )
    return table


def _range(numbers: list[float], digits: int) -> str:
    least, most = (f"{number:.{digits}f}" for number in (min(numbers), max(numbers)))
    return least if least == most else f"{least} to {most}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name)
    return table


def _red(text: str, wrong: bool) -> str:
    return f"[bold red]{text}[/]" if wrong else text
