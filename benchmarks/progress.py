"""A progress bar on stderr during a benchmark, where stderr is a terminal."""

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(total: int) -> Generator[Callable[[str, int], None], None, None]:
    """Show what is measured: give a description and how many of `total` are done.

    The bar is drawn only then: a thread that redraws it would slow short calls while they are timed.
    """
    if not sys.stderr.isatty() or os.environ.get("CI"):
        yield lambda _description, _done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=total)

        def show(description: str, done: int) -> None:
            bar.update(task, description=description, completed=done, refresh=True)

        yield show
