"""Launches of the Triton kernels from JAX: on a GPU, in the interpreter, or only recorded.

This is the one place where a launch happens. A kernel's parameters come in this order: arrays and ints,
outputs, `tl.constexpr` constants; its source is the same wherever it runs.

- On NVIDIA's GPUs, by `attest.kernels.triton.ptx`.
- On AMD's, through jax-triton (0.3.1 or 0.4.1), imported when the first launch needs it.
- Where the process was started with TRITON_INTERPRET=1, which `@triton.jit` reads when a kernel is defined,
  through `attest.kernels.triton.interpreter`, on any CPU.
- Under `attest.kernels.triton.target.recorded`, nowhere: the launches are listed for the compile matrix.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.triton.ptx import launch_ptx, ptx_call
from attest.kernels.triton.target import INTERPRETED, Launch, noted, target_device
from attest.kernels.varying import vary_together


def launch(what: Launch) -> tuple[jax.Array, ...]:
    """Run the kernel once and return its outputs; under `jax.vmap`, once for each entry.

    Inside `jax.shard_map` the kernel runs on each device's part, and its outputs vary over every axis that
    some input varies over. No derivative is defined: wrap it in `jax.custom_vjp`.

    Raises: NotImplementedError where there is no device for it.
    """
    arrays = vary_together(tuple(x for x in what.arguments if isinstance(x, jax.Array)))
    if noted(what):
        outputs = tuple(jnp.zeros(x.shape, x.dtype) for x in what.outputs)
    else:
        target_device()
        outputs = _runner(_Call.of(what))(*arrays)
    # Neither a callback nor jax-triton says so of its outputs.
    _, outputs = vary_together((arrays[:1], outputs))
    return outputs


@dataclass(frozen=True)
class _Call:
    """A launch without its arrays: hashable, so that JAX recognises one that it has compiled."""

    kernel: Any
    ints: tuple[int | None, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    constants: tuple[tuple[str, Any], ...]
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    name: str

    @staticmethod
    def of(what: Launch) -> "_Call":
        return _Call(
            kernel=what.kernel,
            ints=tuple(None if isinstance(x, jax.Array) else x for x in what.arguments),
            outputs=what.outputs,
            constants=tuple(what.constants.items()),
            grid=what.grid,
            num_warps=what.num_warps,
            num_stages=what.num_stages,
            name=what.name,
        )

    def launched_on(self, arrays: Sequence[jax.Array]) -> Launch:
        """Launch again, on arrays in the places of those of the first launch."""
        return Launch(
            kernel=self.kernel,
            arguments=tuple(self.arguments(arrays)),
            outputs=self.outputs,
            constants=dict(self.constants),
            grid=self.grid,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )

    def arguments(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the ints, with the arrays in the places between them."""
        rest = iter(arrays)
        return [next(rest) if x is None else x for x in self.ints]


@lru_cache(maxsize=1024)
def _runner(call: _Call) -> Callable[..., tuple[jax.Array, ...]]:
    run = _interpret if INTERPRETED else _launch_on_gpu
    return jax.custom_batching.sequential_vmap(lambda *arrays: run(call, arrays))


def _interpret(call: _Call, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(jax.pure_callback(_Interpreted(call), call.outputs, *arrays))


@dataclass(frozen=True)
class _Interpreted:
    """The callback of JAX; equal for equal launches, so that no call is compiled twice."""

    call: _Call

    def __call__(self, *arrays: Any) -> tuple[np.ndarray, ...]:
        from attest.kernels.triton.interpreter import interpret  # needs TRITON_INTERPRET=1

        call = self.call
        values = call.arguments([np.asarray(x) for x in arrays])
        return interpret(call.kernel, values, call.outputs, dict(call.constants), call.grid)


def _launch_on_gpu(call: _Call, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    device = target_device()
    if not device.startswith("sm_"):
        return _launch_by_jax_triton(call, arrays)
    return launch_ptx(ptx_call(call.launched_on(arrays), device), *arrays)


def _launch_by_jax_triton(call: _Call, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    import jax_triton  # 0.3.1 cannot be imported without a GPU build of jaxlib

    triton_call: Any = jax_triton.triton_call
    with warnings.catch_warnings():
        # 0.4.1 renames out_shape, which 0.3.1 knows alone.
        warnings.simplefilter("ignore", DeprecationWarning)
        return tuple(
            triton_call(
                *call.arguments(arrays),
                kernel=call.kernel,
                out_shape=call.outputs,
                grid=call.grid,
                name=call.name,
                num_warps=call.num_warps,
                num_stages=call.num_stages,
                **dict(call.constants),
            )
        )
