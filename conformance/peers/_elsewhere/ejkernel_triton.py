"""ejKernel's Triton flash attention in attest's interpreter of Triton, which needs no GPU.

It runs in ejKernel's own environment, with TRITON_INTERPRET=1 and with attest's folder in PYTHONPATH: the
interpreter is the one part of attest that it imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_KERNELS = "ejkernel.kernels._triton.flash_attention"


def flash(query: Any, key: Any, value: Any, *, q_block: int, kv_block: int, **options: Any) -> Any:
    """Return the output of the flash attention."""
    for module in ("_triton_impl_fwd", "_triton_impl_bwd"):
        vars(import_module(f"{_KERNELS}.{module}"))["triton_call"] = _interpreted
    parameters = import_module("ejkernel.ops")
    blocks = {"q_blocksize": q_block, "kv_blocksize": kv_block}
    return import_module(f"{_KERNELS}._interface").flash_attention(
        query,
        key,
        value,
        fwd_params=parameters.FwdParams(**blocks),
        bwd_params=parameters.BwdParams(**blocks),
        **options,
    )


def _interpreted(*arguments: Any, kernel: Any, out_shape: Any, grid: Any, **constants: Any) -> list[Any]:
    """Do what ejKernel's `triton_call` does, with every program run by the interpreter."""
    for of_the_launch in ("name", "num_warps", "num_stages"):
        constants.pop(of_the_launch, None)
    outputs = tuple(jax.ShapeDtypeStruct(each.shape, jnp.dtype(each.dtype)) for each in out_shape)
    places = [index for index, argument in enumerate(arguments) if getattr(argument, "shape", ())]

    def run(*arrays: Any) -> tuple[Any, ...]:
        given = [argument if hasattr(argument, "shape") else _number(argument) for argument in arguments]
        for place, array in zip(places, arrays, strict=True):
            given[place] = np.asarray(array)
        function, chosen = _chosen(kernel, given, constants)
        programs: Any = grid(chosen) if callable(grid) else grid
        interpret = import_module("attest.kernels.triton.interpreter").interpret
        return interpret(function, given, outputs, chosen, tuple(int(count) for count in programs))

    returned: Any = jax.pure_callback(run, outputs, *(arguments[place] for place in places))
    return list(returned)


def _number(argument: Any) -> Any:
    return float(argument) if isinstance(argument, float | np.floating) else int(argument)


def _chosen(kernel: Any, given: list[Any], constants: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the function below Triton's heuristics, and its constants with those that they choose."""
    chosen = dict(constants)
    while not hasattr(kernel, "rewrite"):
        named = dict(zip(kernel.arg_names, given, strict=False))
        for name, heuristic in kernel.values.items():
            chosen[name] = heuristic({**named, **chosen})
        kernel = kernel.fn
    return kernel, chosen
