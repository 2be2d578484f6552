"""Decides how a Hopper kernel is launched: names for its arrays, its shared memory, its warpgroups."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu

from kernels.pallas.mosaic_gpu.problem import Problem

plgpu: Any = mosaic_gpu  # a checker takes its transforms for abstract

WARPGROUP, PROGRAM = "warpgroup", "program"  # the axes of a launch
TMA_ROWS = 8  # the TMA unit sees arrays in tiles of so many rows

type Refs = dict[str, Any]
type Outputs = Mapping[str, jax.ShapeDtypeStruct]


def launch[S](
    body: Callable[[Refs, Refs, S], None],
    shared: Callable[..., S],
    name: str,
    arrays: Mapping[str, Any],
    outputs: Outputs,
    scratch: Mapping[str, Any],
    programs: int,
    warpgroups: int,
) -> dict[str, jax.Array]:
    """The outputs by name. body(arrays, outputs, shared(**scratch)) takes references by the same names.

    arrays: those that are a `jax.Ref` are changed in place. scratch: what `matrix`, `vector` and `barriers`
    describe.
    """

    def unpacked(*refs: Any, **scratch: Any) -> None:
        inputs, results = refs[: len(arrays)], refs[len(arrays) :]
        body(
            dict(zip(arrays, inputs, strict=True)),
            dict(zip(outputs, results, strict=True)),
            shared(**scratch),
        )

    run: Any = plgpu.kernel(
        unpacked,
        out_type=tuple(outputs.values()),
        scratch_types=dict(scratch),
        grid=(programs,),
        grid_names=(PROGRAM,),
        num_threads=warpgroups,
        thread_name=WARPGROUP,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    return dict(zip(outputs, run(*arrays.values()), strict=True))


def matrix(problem: Problem, rows: int, count: int) -> Any:
    """[count, rows, D] in shared memory, in the layout that TMA writes and WGMMA reads."""
    itemsize = jnp.dtype(problem.dtype).itemsize
    swizzle = plgpu.find_swizzle(problem.head_dim * itemsize * 8)
    layout = (plgpu.TilingTransform((TMA_ROWS, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM((count, rows, problem.head_dim), problem.dtype, transforms=layout)


def vector(size: int, count: int) -> Any:
    """[count, size] float32 in shared memory."""
    return plgpu.SMEM((count, size), jnp.float32)


def barriers(count: int, arrivals: int = 1) -> Any:
    """As many barriers, each complete when so many warpgroups and copies have arrived."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
