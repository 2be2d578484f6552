"""The phase of a task, so that one that is cut short can say where its time went.

A worker writes it into a small file, which stays readable when the worker is killed. Nothing is written
where nobody reads it.
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
    """Where this process is. descriptor: of the file that is told, None for none."""

    descriptor: int | None = None
    check: str = ""
    phase: str = "loading"

    def tell(self, phase: str) -> None:
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
    """The phase that a file was last told, and the check that it was for; "loading" and "" before any."""
    try:
        phase, _, check = path.read_text().strip().partition(" ")
    except OSError:
        return "loading", ""
    return phase or "loading", check


@contextmanager
def checking(check: str) -> Generator[None, None, None]:
    """The block judges a check: its phases are for that check, and begin with drawing."""
    _here.check = check
    with phase("drawing"):
        yield


@contextmanager
def phase(name: str) -> Generator[None, None, None]:
    """The block is one phase, of PHASES; what surrounds it goes on afterwards."""
    before = _here.phase
    _here.phase = name
    _here.tell(name)
    try:
        yield
    finally:
        _here.phase = before
        _here.tell(before)


def notice_compiling() -> None:
    """Have JAX say when it compiles, for the rest of this process."""
    import jax

    jax.monitoring.register_event_duration_secs_listener(_heard)


def _heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event in (_TRACED, _LOWERED):
        _here.tell("compiling")
    elif event == _COMPILED:
        _here.tell(_here.phase)
