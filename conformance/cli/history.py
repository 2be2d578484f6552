"""The command `attest history`: what changed in which of several records."""

from pathlib import Path
from typing import Annotated

import typer

from attest.conformance.cli.compare import read_run
from attest.conformance.cli.options import Outputs, UsageError
from attest.conformance.files import write_text


def history(
    records: Annotated[
        list[Path], typer.Argument(help="Records, oldest first, or folders, whose files are read by name.")
    ],
    json: Annotated[Path | None, typer.Option("--json", help="Write the history as JSON here.")] = None,
) -> int:
    """Show what changed in which of several records of the same kernels."""
    from attest.conformance.cli.console import show
    from attest.reports import history as histories
    from attest.reports.render.history import print_history, render_json

    files = [file for path in records for file in (sorted(path.glob("*.json*")) if path.is_dir() else [path])]
    Outputs(json=json).spare(*files)
    entries = [histories.Entry(str(file), read_run(file)) for file in files]
    try:
        found = histories.history(entries)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if json is not None:
        write_text(json, render_json(found))
    show(lambda console: print_history(found, console))
    return 0
