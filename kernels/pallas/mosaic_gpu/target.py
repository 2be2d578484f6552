"""Decides where a Hopper kernel may run: on NVIDIA GPUs of compute capability 9.0.

For what a program is compiled is known when it is lowered, and not before: a process without a GPU may
compile for one, or export. So a call for anything else is refused there, by an operation that does nothing
else.
"""

from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

CAPABILITY = "9.0"

_primitive = Primitive("require_hopper")


def capabilities() -> frozenset[str]:
    """The compute capabilities of the NVIDIA GPUs of this process, none where it has no GPU."""
    if jax.default_backend() != "gpu":
        return frozenset()
    return frozenset(getattr(device, "compute_capability", "none") for device in jax.devices())


def require_hopper(x: jax.Array) -> jax.Array:
    """x; whoever lowers the program for anything but a Hopper GPU gets a NotImplementedError."""
    return _primitive.bind(x)


def _on_cuda(_context: Any, x: Any) -> list[Any]:
    found = capabilities()
    if found and CAPABILITY not in found:
        _refuse(f"GPUs of compute capability {', '.join(sorted(found))}")
    return [x]


def _elsewhere(context: Any, _x: Any) -> list[Any]:
    _refuse(", ".join(context.module_context.platforms))


def _refuse(target: str) -> NoReturn:
    raise NotImplementedError(
        f"kernels.pallas.mosaic_gpu: compiled for {target}, expected an NVIDIA GPU of compute capability "
        f"{CAPABILITY}. Use kernels.flash_attention, which chooses."
    )


_primitive.def_impl(lambda x: x)
_primitive.def_abstract_eval(lambda x: x)
batching.defvectorized(_primitive)
mlir.register_lowering(_primitive, _elsewhere)
mlir.register_lowering(_primitive, _on_cuda, platform="cuda")
