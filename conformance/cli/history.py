"""The command `attest history`: what changed in which of several records."""

import os
import re
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

    files = [file for path in records for file in (_records_of(path) if os.path.isdir(path) else [path])]
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


def _records_of(folder: Path) -> list[Path]:
    """Return the files of a folder that may be records, by name; numbers in names count as numbers."""
    from attest.conformance.records.record_file import ENDINGS

    found = (path for path in folder.iterdir() if path.name.endswith(ENDINGS))
    return sorted(found, key=lambda path: [_part(part) for part in re.split(r"([0-9]+)", path.name)])


def _part(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (0, part)
