"""Launches of the Triton kernels from JAX: on a GPU, in the interpreter, or only recorded.

This is the one place where a launch happens. A kernel's parameters come in this order: arrays and ints,
outputs, `tl.constexpr` constants; its source is the same wherever it runs.

- On NVIDIA's GPUs, by `attest.kernels.triton.ptx`.
- On AMD's, through jax-triton (0.3.1 or 0.4.1), imported when the first launch needs it.
- Where the process was started with TRITON_INTERPRET=1, which `@triton.jit` reads when a kernel is defined,
  through `attest.kernels.triton.interpreter`, on any CPU.
- Under `recorded()`, nowhere: the launches are listed for the compile matrix.
"""

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from triton import knobs

from attest.kernels.triton.spec import KernelSpec
from attest.kernels.varying import vary_together

INTERPRETED = knobs.runtime.interpret


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel.

    kernel: what `@triton.jit` made. arguments: arrays and ints in the order of its parameters; a float must
    be a constant, since no float scalar has the same type in both versions of jax-triton. outputs: shapes
    and dtypes of the arrays it fills, its next parameters. constants: its `tl.constexpr` parameters by name.
    grid: one to three counts of programs.

    Raises: TypeError for an argument that is neither.
    """

    kernel: Any
    arguments: tuple[jax.Array | int, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    constants: Mapping[str, Any]
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        given: tuple[Any, ...] = self.arguments
        for place, argument in enumerate(given):
            if not isinstance(argument, jax.Array | int):
                raise TypeError(
                    f"arguments[{place}] of {self.kernel.__name__}: got {type(argument).__name__}, expected "
                    "a JAX array or an int. Pass a float among the constants, an array through jnp.asarray."
                )

    @property
    def blocks(self) -> dict[str, int]:
        """Its block sizes by name: of its `KernelSpec`, and constants whose name begins with BLOCK."""
        found: dict[str, int] = {}
        for name, value in self.constants.items():
            if isinstance(value, KernelSpec):
                found |= value.blocks
            elif name.startswith("BLOCK"):
                found[name] = value
        return found

    @property
    def name(self) -> str:
        """The kernel, the shapes it is given and its configuration: what an error of the device repeats."""
        arrays = {id(x): x for x in self.arguments if isinstance(x, jax.Array)}
        shapes = [f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for x in arrays.values()]
        blocks = [f"{name}={value}" for name, value in self.blocks.items()]
        configuration = [*blocks, f"warps={self.num_warps}", f"stages={self.num_stages}"]
        return " ".join((self.kernel.__name__, *shapes, *configuration))


@dataclass(frozen=True)
class _Recording:
    target: str
    number: int
    launches: list[Launch] = field(default_factory=list[Launch])


_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)
_numbers = count()


@contextmanager
def recorded(target: str) -> Generator[list[Launch]]:
    """Within the block launches are appended to the list that it yields, and return zeros.

    target: the device that configurations are chosen for, such as "sm_90" or "gfx942". Use it around
    `jax.eval_shape`, so that nothing is computed; the arrays of the launches are then tracers.
    """
    recording = _Recording(target, next(_numbers))
    token = _recording.set(recording)
    try:
        yield recording.launches
    finally:
        _recording.reset(token)


def recording_id() -> int | None:
    """Tells one `recorded` block from another: a cache of traces must, or it keeps launches from the list."""
    recording = _recording.get()
    return None if recording is None else recording.number


def target_device() -> str:
    """The device that a launch would run on: "sm_90", "gfx942", or "interpreter".

    Raises: NotImplementedError where there is none.
    """
    recording = _recording.get()
    if recording is not None:
        return recording.target
    if INTERPRETED:
        return "interpreter"
    if jax.default_backend() != "gpu":
        raise NotImplementedError(
            f"attest.kernels.triton: JAX runs on {jax.default_backend()}, expected a GPU. Use "
            "attest.kernels.xla there, or start the process with TRITON_INTERPRET=1 to run the kernels in "
            "Triton's interpreter."
        )
    capability = str(jax.devices()[0].compute_capability)
    return capability.split(":")[0] if "gfx" in capability else f"sm_{capability.replace('.', '')}"


def shared_memory() -> int | None:
    """The bytes of shared memory that a block may take on the GPU that a launch would run on.

    None where it would run on none, or where JAX does not know.
    """
    if _recording.get() is not None or INTERPRETED:
        return None
    return getattr(jax.devices()[0], "shared_memory_per_block_optin", None)


def launch(what: Launch) -> tuple[jax.Array, ...]:
    """Runs the kernel once and returns its outputs; under `jax.vmap`, once for each entry.

    Inside `jax.shard_map` the kernel runs on each device's part, and its outputs vary over every axis that
    some input varies over. No derivative is defined: wrap it in `jax.custom_vjp`.

    Raises: NotImplementedError where there is no device for it.
    """
    arrays = vary_together(tuple(x for x in what.arguments if isinstance(x, jax.Array)))
    recording = _recording.get()
    if recording is not None:
        recording.launches.append(what)
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
        """The launch again, on arrays in the places of those that it was made of."""
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
        """The ints, with the arrays in the places between them."""
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
    """What JAX calls back; equal for equal launches, so that no call is compiled twice."""

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
    from attest.kernels.triton import ptx  # imports this module

    return ptx.launch_ptx(ptx.ptx_call(call.launched_on(arrays), device), *arrays)


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
