"""One pass of a function as one program, for compilers that take whole programs."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from attest.conformance.cases.case import Case
from attest.conformance.cases.shapes import shapes_of
from attest.conformance.compiling.compilers import Job
from attest.conformance.compiling.devices import Device
from attest.conformance.compiling.roofline import FORWARD, PASSES
from attest.conformance.text import describe
from attest.reference.semantics import GRADIENTS


@dataclass(frozen=True)
class Source:
    """A pass to compile, found again in any process: module and name are those of a function with the
    signature of our kernels that return lse; target is that of the device.
    """

    module: str
    name: str
    which: str
    case: Case
    target: tuple[tuple[str, Any], ...]


def passes(module: str, name: str, case: Case, device: Device) -> list[Job]:
    """The forward and the backward pass of a function; nothing is traced before it is compiled."""
    target = tuple(device.target.items())
    return [Job(which, {}, Source(module, name, which, case, target)) for which in PASSES]


def lowered(source: Source, device: Any) -> Any:
    """The program of a pass for a device of a topology, a `jax.stages.Lowered`.

    Raises RuntimeError with what tracing or lowering raised, in one line.
    """
    try:
        return _lowered(source, SingleDeviceSharding(device))
    except Exception as error:  # kernels are code that may be wrong
        raise RuntimeError(f"its launch raised {describe(error)}") from error


def _lowered(source: Source, sharding: SingleDeviceSharding) -> Any:
    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    call = getattr(import_module(source.module), source.name)
    arrays, options = shapes_of(source.case)
    varied = placed({name: x for name, x in arrays.items() if name in GRADIENTS})
    fixed = placed({name: x for name, x in arrays.items() if name not in varied})

    def forward(varied: dict[str, Any], fixed: dict[str, Any]) -> Any:
        return call(**varied, **fixed, **options)

    if source.which == FORWARD:
        return jax.jit(forward).lower(varied, fixed)

    def pulled(varied: dict[str, Any], fixed: dict[str, Any]) -> Any:
        return jax.vjp(lambda varied: forward(varied, fixed), varied)

    # What JAX keeps for the backward pass is a tree of arrays: its shapes alone make that pass a program.
    outputs, pull = jax.eval_shape(pulled, varied, fixed)
    return jax.jit(lambda pull, cotangents: pull(cotangents)).lower(placed(pull), placed(outputs))
