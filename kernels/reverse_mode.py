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

from attest.kernels.call.call import Call
from attest.kernels.guards import guard
from attest.kernels.sharding.explicit import FLOATS

_EXPECTED = "expected one derivative, in reverse mode, such as jax.grad or jax.vjp take"
_ADVICE = "attest.kernels.xla.attention has derivatives of every kind, in memory for all weights."


def reverse_mode_only(function: str, call: Call) -> Call:
    """Return the call as it is; its derivative in forward mode raises NotImplementedError.

    It is raised where the derivative is computed, which under `jax.jit` is where the program is lowered.
    function: the name of the public function, which the message begins with.
    """
    given = {name: getattr(call, name) for name in FLOATS}
    return replace(
        call, **{name: _argument.bind(x, function=function) for name, x in given.items() if x is not None}
    )


def not_again[T](function: str, tree: T) -> T:
    """Return arrays of either pass as they are; any derivative of them raises NotImplementedError.

    function: as in `reverse_mode_only`.
    """
    return _not_again(function, tree)


_not_again = jax.custom_jvp(lambda function, tree: tree, nondiff_argnums=(0,))


def _refuse_twice(function: str) -> NoReturn:
    raise NotImplementedError(
        f"{function}: got a second derivative, as of jax.hessian; {_EXPECTED}. {_ADVICE}"
    )


_not_again.defjvp(lambda function, *_: _refuse_twice(function))


def _refuse_forward_mode(*_: Any, function: str, **__: Any) -> NoReturn:
    raise NotImplementedError(
        f"{function}: got a derivative in forward mode, as of jax.jvp or jax.jacfwd; {_EXPECTED}. {_ADVICE}"
    )


# The tangent of an argument: reverse mode transposes it, and forward mode computes it, alone or batched.
_tangent = Primitive("flash_attention_tangent")
_tangent.def_abstract_eval(lambda tangent, **_: tangent)
_tangent.def_impl(_refuse_forward_mode)
mlir.register_lowering(_tangent, _refuse_forward_mode)
batching.primitive_batchers[_tangent] = _refuse_forward_mode
ad.primitive_transposes[_tangent] = lambda cotangent, *_, **__: [cotangent]
ad.primitive_jvps[_tangent] = lambda *_, function: _refuse_twice(function)


def _with_tangent(primals: tuple[jax.Array], tangents: tuple[Any], *, function: str) -> tuple[jax.Array, Any]:
    (x,), (tangent,) = primals, tangents
    return _argument.bind(x, function=function), _tangent.bind(tangent, function=function)


# An argument. It is no `jax.custom_jvp`, as `jax.vmap` would batch the tangents of that in reverse mode, too.
_argument = guard("flash_attention_argument", jvp=_with_tangent)
