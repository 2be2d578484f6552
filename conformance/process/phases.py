"""The phase of a task, named in the message of a task that is cut short.

A worker writes it into a small file, which stays readable when the worker is killed.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

# drawing: the case's arrays and the exact answer. compiling, running, gradients: the subject. shrinking: the
# search for a simpler failing case. loading: the subject itself.
PHASES = ("loading", "drawing", "compiling", "running", "gradients", "shrinking")

_WIDTH = 256

# As JAX's monitoring names them: the end of tracing, of lowering and of XLA's work.
_TRACED = "/jax/core/compile/jaxpr_trace_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"


class _Place:
    """The phase of this process. descriptor: of the file that it is written into, None for none."""

    descriptor: int | None = None
    check: str = ""
    phase: str = "loading"

    def write(self, phase: str) -> None:
        if self.descriptor is not None:
            os.pwrite(self.descriptor, f"{phase} {self.check}".encode()[:_WIDTH].ljust(_WIDTH), 0)


_here = _Place()


@contextmanager
def reported(path: Path) -> Generator[None, None, None]:
    """Write the phase into a file while the block runs; `read_phase` reads it."""
    _here.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        yield
    finally:
        os.close(_here.descriptor)
        _here.descriptor = None


def read_phase(path: Path) -> tuple[str, str]:
    """Return the phase that was last written into a file, and its check; "loading" and "" before any."""
    try:
        phase, _, check = path.read_text().strip().partition(" ")
    except OSError:
        return "loading", ""
    return phase or "loading", check


@contextmanager
def checking(check: str) -> Generator[None, None, None]:
    """Report the phases of the block as those of a check; the first is drawing."""
    _here.check = check
    with phase("drawing"):
        yield


@contextmanager
def phase(name: str) -> Generator[None, None, None]:
    """Report the block as a phase, one of PHASES; the phase around it goes on afterwards."""
    before = _here.phase
    _here.phase = name
    _here.write(name)
    try:
        yield
    finally:
        _here.phase = before
        _here.write(before)


def notice_compiling() -> None:
    """Report the compilations of JAX as a phase, for the rest of this process."""
    import jax

    jax.monitoring.register_event_duration_secs_listener(_note)


def _note(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event in (_TRACED, _LOWERED):
        _here.write("compiling")
    elif event == _COMPILED:
        _here.write(_here.phase)
