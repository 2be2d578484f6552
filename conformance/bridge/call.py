"""`bridged`: a function of another environment as a differentiable function of JAX arrays."""

import json
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from attest.conformance.bridge import client, server
from attest.conformance.bridge.client import Origin, call_function
from attest.conformance.subject import GradientDtype

Framework = Literal["numpy", "jax", "torch"]


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a record of JAX's log is of another exception than those that are raised here anyway."""
    trace = record.exc_info[2] if record.exc_info else None
    return all(frame.f_code.co_filename != client.__file__ for frame, _ in traceback.walk_tb(trace))


# It logs each exception of a callback with its traceback, hundreds for a kernel that fails in every case.
logging.getLogger("jax._src.callback").addFilter(_is_news)


def bridged(
    python: str | PathLike[str],
    function: str,
    *,
    framework: Framework = "numpy",
    returns_lse: bool = False,
    gradient_dtype: GradientDtype = "input",
    name: str = "",
    variables: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """Return the `call` of a Subject whose kernel runs in another environment.

    The function there gets query, key and value, and the keyword options of the call, as arrays of its
    framework, on its default device. It returns out, or (out, lse): out of the dtype of query, lse float32.
    Here, the call works under `jax.jit`, `jax.grad` and `jax.vmap`, which calls it once for each element.
    The process there starts with the first call, and ends with this process.

    Args:
        python: The interpreter of the other environment, such as "/path/venv/bin/python". It needs Python
            3.9, NumPy and the framework; attest is not needed there.
        function: "module:function" or "file.py:function".
        framework: "numpy", "jax" or "torch". Gradients are taken there by `jax.vjp` or by PyTorch's
            autograd. A function of NumPy arrays has none.
        returns_lse: Whether the function returns (out, lse).
        gradient_dtype: As `Subject.gradient_dtype`: of the gradients, "input" for that of each input, or
            "float32".
        name: The name of the kernel in errors; by default, `function`.
        variables: Environment variables of the process there, beside those of this process. PYTHONPATH is
            not inherited.

    Raises:
        ValueError: If `function` has no colon, or `framework` is another one.
    """
    known = get_args(Framework)
    if framework not in known:
        raise ValueError(f"framework: got {framework!r}, expected one of {known}")
    module, _, attribute = function.rpartition(":")
    if not (module and attribute):
        raise ValueError(f"function: got {function!r}, expected module:function or file.py:function")
    origin = Origin(
        name or function, fspath(python), function, framework, tuple(sorted((variables or {}).items()))
    )
    results = ("out", "lse") if returns_lse else ("out",)
    return partial(_call, origin, results, gradient_dtype)


@dataclass(frozen=True)
class _Calling:
    """The static part of a call. options: those that are not arrays, as JSON."""

    origin: Origin
    results: tuple[str, ...]
    gradient_dtype: GradientDtype
    options: str


# The arrays that a call is differentiated by: static, unlike the arrays kept for the backward pass.
@jax.tree_util.register_static
@dataclass(frozen=True)
class _Varied:
    names: tuple[str, ...]


def _call(
    origin: Origin,
    results: tuple[str, ...],
    gradient_dtype: GradientDtype,
    query: Any,
    key: Any,
    value: Any,
    **options: Any,
) -> Any:
    arrays = {"query": query, "key": key, "value": value}
    arrays |= {name: option for name, option in options.items() if _is_array(option)}
    for array_name, array in arrays.items():
        if array_name in ("query", "key", "value") and np.ndim(array) < 3:
            raise ValueError(
                f"{array_name}: got shape {np.shape(array)}, expected [..., length, heads, head dim]"
            )
        dtype = getattr(array, "dtype", type(array).__name__)
        if str(dtype) not in server.ITEM_SIZES:
            raise TypeError(
                f"{array_name}: got {dtype}, expected an array of one of {', '.join(server.ITEM_SIZES)}"
            )
    fixed: dict[str, Any] = {}
    for option_name, option in options.items():
        if option_name not in arrays:
            try:
                fixed[option_name] = server.encoded(option)
            except TypeError as error:
                raise TypeError(
                    f"{option_name}: got a {error}, expected an array, or a number, string, None, tuple, "
                    "list or dict of them, which another process can be sent"
                ) from None
    calling = _Calling(origin, results, gradient_dtype, json.dumps(fixed))
    returned: Any = _attend(calling, {name: jnp.asarray(array) for name, array in arrays.items()})
    return returned if len(results) > 1 else returned[0]


def _is_array(option: Any) -> bool:
    return isinstance(option, (jax.Array, np.ndarray))


def _forward(calling: _Calling, arrays: Mapping[str, Any], varied: tuple[str, ...] = ()) -> tuple[Any, ...]:
    query, value = arrays["query"], arrays["value"]
    *batch, length, heads, _ = query.shape
    shapes = {
        "out": jax.ShapeDtypeStruct((*batch, length, heads, value.shape[-1]), query.dtype),
        "lse": jax.ShapeDtypeStruct((*batch, heads, length), jnp.float32),
    }
    expected = {name: shapes[name] for name in calling.results}
    found = _run(calling, {"varied": varied, "gradients": False}, arrays, expected)
    return tuple(found[name] for name in calling.results)


def _run(
    calling: _Calling, asked: Mapping[str, Any], arrays: Mapping[str, Any], expected: Mapping[str, Any]
) -> dict[str, Any]:
    """Run a call there: at once if all arrays have values, so that its exceptions are raised as they are."""
    message = {"options": json.loads(calling.options), "results": calling.results, **asked}

    def run(given: Mapping[str, Any]) -> dict[str, Any]:
        return call_function(
            calling.origin, message, {name: np.asarray(array) for name, array in given.items()}, expected
        )

    if any(isinstance(array, Tracer) for array in arrays.values()):
        return jax.pure_callback(run, dict(expected), dict(arrays), vmap_method="sequential")
    return {name: jnp.asarray(array) for name, array in run(arrays).items()}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(calling: _Calling, arrays: Mapping[str, Any]) -> Any:
    return _forward(calling, arrays)


def _attend_forward(calling: _Calling, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
    varied = tuple(name for name, each in arrays.items() if each.perturbed)
    if varied and calling.origin.framework == "numpy":
        raise NotImplementedError(
            f"{calling.origin.name}: a function of NumPy arrays has no gradient of {', '.join(varied)}: "
            "pass framework='jax' or 'torch', or declare Semantics(gradients=frozenset())"
        )
    values = {name: each.value for name, each in arrays.items()}
    return _forward(calling, values, varied), (values, _Varied(varied))


def _attend_backward(calling: _Calling, kept: Any, cotangents: Any) -> tuple[Any]:
    arrays, varied = kept
    given = {
        server.COTANGENT + name: _zeros(each) if isinstance(each, SymbolicZero) else each
        for name, each in zip(calling.results, cotangents, strict=True)
    }
    wide = jnp.float32 if calling.gradient_dtype == "float32" else None
    expected = {
        name: jax.ShapeDtypeStruct(arrays[name].shape, wide or arrays[name].dtype) for name in varied.names
    }
    found = _run(calling, {"varied": varied.names, "gradients": True}, {**arrays, **given}, expected)
    return ({name: found.get(name) for name in arrays},)


def _zeros(like: Any) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
