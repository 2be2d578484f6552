"""Guards: primitives that return their array as it is, and refuse what a program may not do with it.

A guard acts while JAX traces, differentiates or lowers a program. It leaves nothing in what is lowered.
"""

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def guard(
    name: str, *, lower: Callable[..., list[Any]] | None = None, jvp: Callable[..., Any] | None = None
) -> Primitive:
    """Return a primitive of one array, which may also be mapped by `jax.vmap`.

    lower: what lowers it, from a context, the array and the parameters, in place of the array alone. jvp: the
    rule of its derivative; without one JAX refuses a derivative.
    """
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lower or (lambda _, x, **__: [x]))
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    return primitive
