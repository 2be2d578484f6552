"""Compiled programs of candidates: one for each, which is judged and then timed."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.operations.inputs import CONSTANTS
from attest.kernels.operations.judging import Program


def compiled(run: Callable[..., Any], arguments: Mapping[str, Any], backward: bool) -> Program:
    """Compile a candidate for a call, with its gradients in all float arrays or without.

    run: from arguments by name to out, or to a tuple of which out is the first. arguments: of the call;
    arrays may be jax.ShapeDtypeStruct.

    Raises: what `run` or the compiler raises.
    """
    shapes = {
        name: jax.tree.map(_shape, x)
        for name, x in arguments.items()
        if any(map(_is_array, jax.tree.leaves(x)))
    }
    static = {name: x for name, x in arguments.items() if name not in shapes}
    floats = {name: x for name, x in shapes.items() if _is_float(x) and name not in CONSTANTS}
    others = {name: x for name, x in shapes.items() if name not in floats}

    def forward(floats: dict[str, Any], others: dict[str, Any]) -> Any:
        out = run(**floats, **others, **static)
        return out[0] if isinstance(out, tuple) else out

    def compute(floats: dict[str, Any], others: dict[str, Any], cotangent: Any) -> dict[str, Any]:
        if not backward:
            return {"out": forward(floats, others)}
        out, pull = jax.vjp(lambda floats: forward(floats, others), floats)
        (gradients,) = pull(cotangent)
        return {"out": out} | {f"d{name}": x for name, x in gradients.items()}

    out = jax.eval_shape(forward, floats, others)
    like = jax.ShapeDtypeStruct(out.shape, out.dtype)
    program = jax.jit(compute).lower(floats, others, like if backward else None).compile()

    def bind(arguments: Mapping[str, Any], cotangent: Any = None) -> Callable[[], dict[str, Any]]:
        given = {name: jax.tree.map(jnp.asarray, arguments[name]) for name in shapes}
        operands = {name: given[name] for name in floats}, {name: given[name] for name in others}
        if backward:
            cotangent = jnp.asarray(np.ones(out.shape) if cotangent is None else cotangent, out.dtype)
        return lambda: program(*operands, cotangent if backward else None)

    return bind


def _shape(x: Any) -> Any:
    if not _is_array(x):
        return x
    # JAX reads int64 of NumPy as int32, and warns of it in a shape.
    known = isinstance(x, np.ndarray) and x.dtype.kind in "iu"
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype) if known else x.dtype)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape")


def _is_float(x: Any) -> bool:
    return _is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
