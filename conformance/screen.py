"""How a user and a run meet: a progress bar on a terminal and nothing elsewhere, and how a run is ended."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from conformance.runner import Progress


def console() -> Console:
    """Where reports are printed: coloured on terminals only, and not under NO_COLOR."""
    return Console(file=sys.stdout, highlight=False)


@contextmanager
def progress() -> Generator[Callable[[Progress], None], None, None]:
    """Shows what it is told."""
    if not sys.stderr.isatty() or os.environ.get("CI"):
        yield lambda _progress: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=None)

        def show(now: Progress) -> None:
            red = f", {now.red} red" if now.red else ""
            bar.update(task, description=now.stage + red, completed=now.done, total=now.total)

        yield show


@contextmanager
def interruptible() -> Generator[None, None, None]:
    """Asked to end by a signal, a run ends as by Ctrl-C: with what it has found."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
