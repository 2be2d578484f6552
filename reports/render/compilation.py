"""What a person at a terminal sees of the compile matrix: what fails, by name, then a row for each kernel."""

from rich.console import Console
from rich.table import Table

from conformance.compile_matrix import Matrix, Result
from reports.render.terminal import plain
from reports.words import one_line, plural

_LISTED = 50
_WIDTH = 400


def print_matrix(matrix: Matrix, console: Console) -> None:
    """Every failing cell with its numbers, the worst of each kernel on each device, the status."""
    failing = [result for result in matrix.results if result.faults]
    for result in sorted(failing, key=lambda result: str(result.cell))[:_LISTED]:
        plain(
            console, one_line(f"FAIL {result.cell}: {'; '.join(result.faults)}{_configuration(result)}", 400)
        )
    if len(failing) > _LISTED:
        plain(console, f"and {len(failing) - _LISTED} more failing: --json keeps them all")
    if failing:
        console.print()
    console.print(_worst(matrix))
    console.print()
    asked = " ".join(filter(None, (f"profile {matrix.profile}", matrix.narrowed)))
    counts = f"{plural(len(matrix.results), 'configuration')}, {plural(matrix.compilations, 'compilation')}"
    verdict = f"FAIL: {len(failing)} of" if failing else "PASS:"
    style = "bold red" if failing else "green"
    plain(console, f"{verdict} {counts} in {matrix.seconds:.0f} s ({asked})", style)


def _configuration(result: Result) -> str:
    words = " ".join(f"{name}={value}" for name, value in result.configuration.items())
    return f" ({words})" if words else ""


def _worst(matrix: Matrix) -> Table:
    rows: dict[tuple[str, str, str], list[Result]] = {}
    for result in matrix.results:
        rows.setdefault((result.cell.target, result.cell.compiler, result.cell.kernel), []).append(result)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("target", "compiler", "kernel"):
        table.add_column(name)
    for name in ("compiled", "registers", "spilling", "bytes", "shared"):
        table.add_column(name, justify="right")
    for names, results in sorted(rows.items()):
        table.add_row(*names, *_numbers(results))
    return table


def _numbers(results: list[Result]) -> tuple[str, ...]:
    """How many compile, then the worst of those that do."""
    binaries = [result.outcome.binary for result in results if result.outcome.binary is not None]
    compiled = _red(f"{len(binaries)}/{len(results)}", len(binaries) < len(results))
    if not binaries:
        return compiled, "-", "-", "-", "-"
    limits = results[0].limits
    spilling = sum(binary.spill_bytes > 0 for binary in binaries)
    spilt = max(binary.spill_bytes for binary in binaries)
    share = max(binary.shared_bytes for binary in binaries) / limits["shared_bytes"]
    return (
        compiled,
        f"{max(binary.registers for binary in binaries)}/{limits['registers']}",
        _red(str(spilling), spilling > 0),
        _red(str(spilt), spilt > 0),
        _red(f"{share:.0%}", share > 1),
    )


def _red(text: str, wrong: bool) -> str:
    return f"[bold red]{text}[/]" if wrong else text
