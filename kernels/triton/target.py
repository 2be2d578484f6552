"""A launch of a Triton kernel, the device that it would run on, and the list of those that run on none."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import jax
from triton import knobs

from attest.kernels.triton.spec import KernelSpec

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
        """The block sizes by name: of its `KernelSpec`, and constants whose name begins with BLOCK."""
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
    """Append launches within the block to the list that it yields; they return zeros.

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
    """Return the id of the `recorded` block, which a cache of traces needs to tell one block from another."""
    recording = _recording.get()
    return None if recording is None else recording.number


def target_device() -> str:
    """Return the device that a launch would run on: "sm_90", "gfx942", or "interpreter".

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
    """Return the bytes of shared memory that a block may take on the GPU that a launch would run on.

    None where it would run on none, or where JAX does not know.
    """
    if _recording.get() is not None or INTERPRETED:
        return None
    return getattr(jax.devices()[0], "shared_memory_per_block_optin", None)


def noted(what: Launch) -> bool:
    """Return whether the launch was appended to the list of a `recorded` block, so that it runs nowhere."""
    recording = _recording.get()
    if recording is not None:
        recording.launches.append(what)
    return recording is not None
