"""The interpreter of Pallas for TPU kernels of other projects, which a CPU then runs."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import jax


def interpreted(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the same arguments whose TPU kernels are interpreted, forward and backward.

    Options without a shape are fixed when it is traced. JAX traces a backward pass long after the call, hence
    the derivative of our own. The context manager of Pallas hands the kernels' `interpret` on; True means the
    interpreter that compiles them for this machine.
    """

    @wraps(call)
    def attend(query: Any, key: Any, value: Any, **options: Any) -> Any:
        from jax.experimental.pallas import tpu

        interpreting: Any = tpu.force_tpu_interpret_mode
        arrays = {name: x for name, x in options.items() if hasattr(x, "shape")}
        fixed = {name: x for name, x in options.items() if name not in arrays}

        def plain(given: Mapping[str, Any]) -> Any:
            return call(**given, **fixed)

        @jax.custom_vjp
        def of_arrays(given: Mapping[str, Any]) -> Any:
            with interpreting(True):
                return plain(given)

        def forward(given: Mapping[str, Any]) -> Any:
            with interpreting(True):
                return jax.vjp(plain, given)

        def backward(pull: Any, cotangents: Any) -> Any:
            with interpreting(True):
                return pull(cotangents)

        of_arrays.defvjp(forward, backward)
        return of_arrays({"query": query, "key": key, "value": value, **arrays})

    return attend
