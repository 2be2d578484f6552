"""One pass of a function as one program, for compilers that take whole programs."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from attest.conformance.cases.case import Case
from attest.conformance.cases.shapes import shapes_of
from attest.conformance.compiling.compiler import Job
from attest.conformance.compiling.devices import Device
from attest.conformance.compiling.roofline import FORWARD, PASSES
from attest.conformance.text import describe
from attest.reference.semantics import GRADIENTS


@dataclass(frozen=True)
class Source:
    """A pass to compile, found again in any process.

    module and name are those of a function with the signature of our kernels that return lse; target is that
    of the device.
    """

    module: str
    name: str
    which: str
    case: Case
    target: tuple[tuple[str, Any], ...]


def passes(module: str, name: str, case: Case, device: Device) -> list[Job]:
    """Return the forward and the backward pass of a function; nothing is traced before it is compiled."""
    target = tuple(device.target.items())
    return [Job(which, {}, Source(module, name, which, case, target)) for which in PASSES]


@dataclass(frozen=True)
class Call:
    """A pass of `run` on the arrays of a case; its signature is that of our kernels that return lse."""

    run: Callable[..., Any]
    case: Case
    which: str


# What gives the array of a name its place; what JAX keeps for the backward pass has the name "".
type Place = Callable[[str, Any], jax.ShapeDtypeStruct]


def lowered(source: Source, device: Any) -> Any:
    """Return the program of a pass for a device of a topology, a `jax.stages.Lowered`.

    Raises RuntimeError with what tracing or lowering raised, in one line.
    """
    sharding = SingleDeviceSharding(device)

    def placed(_name: str, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    with one_line_errors():
        call = Call(getattr(import_module(source.module), source.name), source.case, source.which)
        return program_of(call, placed)


@contextmanager
def one_line_errors() -> Generator[None]:
    """Raise what is raised within the block as a RuntimeError in one line."""
    try:
        yield
    except Exception as error:  # kernels are code that may be wrong
        raise RuntimeError(f"its launch raised {describe(error)}") from error


def program_of(call: Call, place: Place) -> Any:
    """Return the program of a pass on arrays that `place` spreads over devices, a `jax.stages.Lowered`."""
    arrays, options = shapes_of(call.case)
    placed = {name: place(name, x) for name, x in arrays.items()}
    varied = {name: x for name, x in placed.items() if name in GRADIENTS}
    fixed = {name: x for name, x in placed.items() if name not in varied}

    def forward(varied: dict[str, Any], fixed: dict[str, Any]) -> Any:
        return call.run(**varied, **fixed, **options)

    if call.which == FORWARD:
        return jax.jit(forward).lower(varied, fixed)

    def pulled(varied: dict[str, Any], fixed: dict[str, Any]) -> Any:
        return jax.vjp(lambda varied: forward(varied, fixed), varied)

    # What JAX keeps for the backward pass is a tree of arrays: its shapes alone make that pass a program.
    kept = jax.eval_shape(pulled, varied, fixed)
    outputs, pull = jax.tree.map(lambda x: place("", x), kept)
    return jax.jit(lambda pull, cotangents: pull(cotangents)).lower(pull, outputs)
