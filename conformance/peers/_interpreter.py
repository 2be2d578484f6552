"""The interpreter of Pallas for TPU kernels of other projects, which a CPU then runs."""

from collections.abc import Callable, Mapping
from typing import Any

import jax


def interpreted(call: Callable[[Mapping[str, Any]], Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function of arrays by name whose TPU kernels are interpreted, forward and backward.

    JAX traces a backward pass long after the call, hence the derivative of our own. The context manager of
    Pallas hands the kernels' `interpret` on; True means the interpreter that compiles them for this machine.
    """
    from jax.experimental.pallas import tpu

    interpreting: Any = tpu.force_tpu_interpret_mode

    @jax.custom_vjp
    def attend(arrays: Mapping[str, Any]) -> Any:
        with interpreting(True):
            return call(arrays)

    def forward(arrays: Mapping[str, Any]) -> Any:
        with interpreting(True):
            return jax.vjp(call, arrays)

    def backward(pull: Any, cotangents: Any) -> Any:
        with interpreting(True):
            return pull(cotangents)

    attend.defvjp(forward, backward)
    return attend
