"""The refusal of what differentiates a call in another way than once and in reverse mode.

`jax.custom_vjp` leaves this to JAX: it refuses forward mode without the name of our function, and in a second
derivative it differentiates either pass as any other function, which no implementation promises to allow.
What is here changes no program, since nothing of it is left when a program is lowered.
"""

from dataclasses import replace
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from attest.kernels.arguments import Call
from attest.kernels.dispatch import FLOATS

_EXPECTED = "expected one derivative, in reverse mode, such as jax.grad or jax.vjp take"
_ADVICE = "attest.kernels.xla.attention has derivatives of every kind, in memory for all weights."


def reverse_mode_only(call: Call) -> Call:
    """Return the call as it is; its derivative in forward mode raises NotImplementedError.

    It is raised where the derivative is computed, which under `jax.jit` is where the program is lowered.
    """
    given = {name: getattr(call, name) for name in FLOATS}
    return replace(call, **{name: _argument.bind(x) for name, x in given.items() if x is not None})


@jax.custom_jvp
def not_again[T](tree: T) -> T:
    """Return arrays of either pass as they are; any derivative of them raises NotImplementedError."""
    return tree


def _refuse_twice(*_: Any) -> NoReturn:
    raise NotImplementedError(
        f"flash_attention: got a second derivative, as of jax.hessian; {_EXPECTED}. {_ADVICE}"
    )


not_again.defjvp(_refuse_twice)


def _refuse_forward_mode(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "flash_attention: got a derivative in forward mode, as of jax.jvp or jax.jacfwd; "
        f"{_EXPECTED}. {_ADVICE}"
    )


# The tangent of an argument: reverse mode transposes it, and forward mode computes it, alone or batched.
_tangent = Primitive("flash_attention_tangent")
_tangent.def_abstract_eval(lambda tangent: tangent)
_tangent.def_impl(_refuse_forward_mode)
mlir.register_lowering(_tangent, _refuse_forward_mode)
batching.primitive_batchers[_tangent] = _refuse_forward_mode
ad.primitive_transposes[_tangent] = lambda cotangent, _: [cotangent]
ad.primitive_jvps[_tangent] = _refuse_twice


def _with_tangent(primals: tuple[jax.Array], tangents: tuple[Any]) -> tuple[jax.Array, Any]:
    (x,), (tangent,) = primals, tangents
    return _argument.bind(x), _tangent.bind(tangent)


# An argument. It is no `jax.custom_jvp`, as `jax.vmap` would batch the tangents of that in reverse mode, too.
_argument = Primitive("flash_attention_argument")
_argument.def_abstract_eval(lambda x: x)
_argument.def_impl(lambda x: x)
mlir.register_lowering(_argument, lambda _, x: [x])
batching.defvectorized(_argument)
ad.primitive_jvps[_argument] = _with_tangent
