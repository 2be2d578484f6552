"""The console: reports on stdout, and sentences on stderr.

Control characters in texts do not reach the terminal. A failed write is reported in one sentence.
"""

import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console

from attest.conformance.files import FileError
from attest.conformance.text import printable, sentence

# Fewer columns than this show nothing that can be read.
_NARROWEST = 20


def console_of(**options: Any) -> Console:
    """Return a console of rich. COLUMNS and LINES count only if they are sizes that a text fits into."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES")
        or (re.fullmatch("[0-9]{1,4}", value) and int(value) >= _NARROWEST)
    }
    return Console(_environ=variables, **options)


def show(*prints: Callable[[Console], None]) -> None:
    """Print reports: coloured on terminals only, and not under NO_COLOR. Raises FileError."""
    page = io.StringIO()  # written as a whole, so that errors of writing occur in one place
    on_terminal = sys.stdout is not None and sys.stdout.isatty()  # type: ignore[reportUnnecessaryComparison]
    console = console_of(file=page, force_terminal=on_terminal or None, highlight=False)
    for print_it in prints:
        print_it(console)
    _write(page.getvalue())


def print_text(text: str) -> None:
    """Print text. Raises FileError."""
    _write(printable(text) + "\n")


def complain(text: str) -> None:
    """Print an error on stderr, in one line; nothing if stderr is closed."""
    note(sentence(text))


def note(text: str) -> None:
    """Print a line on stderr as long as it is, so that a command in it can be copied."""
    if sys.stderr is not None:  # type: ignore[reportUnnecessaryComparison] - it is None where it is closed
        with suppress(OSError):
            print(f"attest: {printable(text)}", file=sys.stderr, flush=True)


def _write(text: str) -> None:
    if sys.stdout is None:  # type: ignore[reportUnnecessaryComparison] - it is None where it is closed
        raise FileError("stdout is closed: nothing could be printed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _give_up_stdout()
        raise FileError(f"stdout: cannot be written: {error.strerror or error}") from error


def _give_up_stdout() -> None:
    """Keep Python from writing the rest of its buffer again when it ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
