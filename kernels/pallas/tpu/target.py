"""Decides where a TPU kernel may run: on a TPU, or under the interpreter of Pallas.

For what a program is compiled is known when it is lowered, and not before: a process without a TPU may
compile for one, or export. So a call for anything else is refused there, by an operation that does nothing
else.
"""

from typing import Any

import jax
from jax._src import config
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_primitive = Primitive("require_tpu")


def interpreting() -> bool:
    """Whether `pltpu.force_tpu_interpret_mode` is in force here."""
    return bool(config.pallas_tpu_interpret_mode_context_manager.value)


def require_tpu(x: jax.Array) -> jax.Array:
    """x; whoever lowers the program for anything but a TPU gets a NotImplementedError."""
    return _primitive.bind(x)


def _identity(_context: Any, x: Any) -> list[Any]:
    return [x]


def _refuse(context: Any, _x: Any) -> list[Any]:
    platforms = context.module_context.platforms
    raise NotImplementedError(
        f"kernels.pallas.tpu: compiled for {', '.join(platforms)}, expected tpu. Use kernels.xla there, or "
        "call it under jax.experimental.pallas.tpu.force_tpu_interpret_mode() to interpret the kernels."
    )


_primitive.def_impl(lambda x: x)
_primitive.def_abstract_eval(lambda x: x)
batching.defvectorized(_primitive)
mlir.register_lowering(_primitive, _refuse)
mlir.register_lowering(_primitive, _identity, platform="tpu")
