"""The start of worker processes: forked from a server that has imported everything, or spawned.

A forked process begins within milliseconds, a spawned one imports everything first, which takes seconds. The
server has run no kernel and no code of a subject, so each process that it forks is as good as a new one.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

_PRELOADED = "attest.conformance.running.preloaded"

# The server and each process begin with these blocked: one that goes to the whole group, as that of Ctrl-C,
# prints nothing, and the server does not end before the run, which would take its processes for dead.
BLOCKED = (signal.SIGINT, signal.SIGTERM)

# Variables that take effect when Python starts and when modules are imported: the server keeps their values.
_EARLY = ("JAX_", "XLA_", "TRITON_", "TF_", "OPENBLAS_", "OMP_", "MKL_", "NPY_", "PYTHON", "LD_")


class _Server:
    """The server of this process. early: the variables that it started with, None before it has."""

    early: Mapping[str, str] | None = None


def start(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start a process that does `work(*arguments)`, with SIGINT and SIGTERM blocked.

    It has the environment, the path and the current folder of this process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        if _may_fork():
            try:
                return _started("forkserver", work, arguments)
            except (EOFError, OSError):  # the server has died; a process that it did not fork says why
                pass
        return _started("spawn", work, arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _started(method: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> BaseProcess:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=_begin, args=(dict(os.environ), work, arguments), daemon=True)
    process.start()
    return process


def _begin(variables: Mapping[str, str], work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    work(*arguments)


def _may_fork() -> bool:
    """Return whether the server runs with the settings of this process, after starting it if needed."""
    # Elsewhere system libraries do not allow a fork; -E hides from the server where it may import from.
    if sys.platform != "linux" or sys.flags.ignore_environment:
        return False
    early = _early()
    if _Server.early is None:
        try:
            multiprocessing.get_context("forkserver").set_forkserver_preload([_PRELOADED])
            with _importing_as_here():
                # It unblocks the signals when it starts, so that the server would not have them blocked.
                resource_tracker.ensure_running()
                signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
                forkserver.ensure_running()
        except OSError:
            return False
        _Server.early = early
    return _Server.early == early


def _early() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_EARLY)}


@contextmanager
def _importing_as_here() -> Generator[None, None, None]:
    """Let new Python processes import from the folders of this one, never from the current folder."""
    before = dict(os.environ)
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
