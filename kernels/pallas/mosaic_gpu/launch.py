"""Decides how a checked call becomes a launch of the Hopper kernel: what it takes, padding, memory, barriers.

What is read row by row or pair by pair is padded here to whole blocks, so that reading needs no bounds. The
TMA unit reads rows past the end as 0 and writes none.
"""

from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu

from kernels.arguments import Call
from kernels.flash import Settings, sinks_alone
from kernels.pallas.mosaic_gpu.blocks import ROWS, Blocks, choose, head_dims
from kernels.pallas.mosaic_gpu.forward import PROGRAM, WARPGROUP, flash_forward
from kernels.pallas.mosaic_gpu.problem import LOG2E, Problem, describe, is_plain
from kernels.pallas.padding import padded
from kernels.ranges import key_blocks
from kernels.visibility import Rows, ahead, describe_rows

plgpu: Any = mosaic_gpu  # a checker takes its transforms for abstract

TMA_ROWS = 8  # the TMA unit sees arrays in tiles of so many rows


def forward(settings: Settings, call: Call) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out [B, Sq, Hq, D], dtype of query; lse and row_max [B, Hq, Sq] float32, natural logarithms.

    row_max is that of the visible logits alone, without sinks; -inf where a row sees no key.
    settings.forward is a `Blocks`, or None for the table's choice.

    Raises: NotImplementedError naming what the kernel does not take (S20).
    """
    blocks = _supported(settings, call)
    batch, q_length, heads, _ = call.query.shape
    if 0 in (q_length, call.key.shape[1]):
        # Nothing to launch over, or nothing to see: only the sinks speak.
        nothing = jnp.full((batch, heads, q_length), -jnp.inf, jnp.float32)
        return jnp.zeros_like(call.query), sinks_alone(call), nothing
    with ahead(call):
        rows = describe_rows(call)
        problem = describe(call, rows, blocks)
        ranges = key_blocks(call, rows, blocks.q, blocks.k) if problem.described else None
    arrays = _tensors(call) | _visibility(problem, call, rows, ranges) | _pairs(problem, call)
    if call.softmax_aux is not None:
        sinks = jax.nn.logsumexp(jnp.atleast_2d(call.softmax_aux).astype(jnp.float32), axis=-1)
        arrays["sinks"] = jnp.broadcast_to(sinks, (heads,)) * LOG2E
    out, lse, row_max = _launch(problem, arrays)
    out, lse, row_max = out[:, :q_length], lse[..., :q_length], row_max[..., :q_length]
    if rows.padding is not None and call.softmax_aux is not None:
        lse = jnp.where(rows.padding[:, None, :], -jnp.inf, lse)
    return out, lse, row_max


def _launch(problem: Problem, arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    per_row = jax.ShapeDtypeStruct(
        (problem.batch, problem.heads, problem.q_blocks * problem.blocks.q), jnp.float32
    )
    run: Any = plgpu.kernel(
        partial(flash_forward, problem, tuple(arrays)),
        out_type=(jax.ShapeDtypeStruct(arrays["query"].shape, problem.dtype), per_row, per_row),
        scratch_types=_shared(problem),
        grid=(problem.programs,),
        grid_names=(PROGRAM,),
        num_threads=problem.blocks.consumers + 1,
        thread_name=WARPGROUP,
        kernel_name="flash_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    return run(*arrays.values())


def _shared(problem: Problem) -> dict[str, Any]:
    """The fields of `forward.Shared`: tiles in the layout that TMA writes and WGMMA reads, and barriers."""
    blocks, dtype, head_dim = problem.blocks, problem.dtype, problem.head_dim
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(head_dim * itemsize * 8)
    layout = (plgpu.TilingTransform((TMA_ROWS, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    own = plgpu.SMEM((blocks.consumers, ROWS, head_dim), dtype, transforms=layout)
    ring = plgpu.SMEM((blocks.stages, blocks.k, head_dim), dtype, transforms=layout)
    full = plgpu.Barrier(num_barriers=blocks.stages)
    empty = plgpu.Barrier(num_arrivals=blocks.consumers, num_barriers=blocks.stages)
    fields: dict[str, Any] = {
        "query": own,
        "key": ring,
        "value": ring,
        "query_full": plgpu.Barrier(num_barriers=blocks.consumers),
        "query_empty": plgpu.Barrier(num_arrivals=blocks.consumers),
        "key_full": full,
        "key_empty": empty,
        "value_full": full,
        "value_empty": empty,
        "turn": plgpu.Barrier(num_barriers=blocks.consumers),
    }
    return fields if blocks.programs is None else {**fields, "out": own}


def _tensors(call: Call) -> dict[str, jax.Array]:
    """query, key and value, with lengths that the TMA unit takes: a copy where they are no multiple of 8."""
    arrays = {"query": call.query, "key": call.key, "value": call.value}
    return {name: padded(x, 1, -(-x.shape[1] // TMA_ROWS) * TMA_ROWS, 0) for name, x in arrays.items()}


def _visibility(problem: Problem, call: Call, rows: Rows, ranges: jax.Array | None) -> dict[str, jax.Array]:
    """What decides which keys a row sees, beyond causal order: of all batch rows if of one."""
    q_length = problem.q_blocks * problem.blocks.q
    entries = problem.batch if problem.by_batch else 1

    def spread(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (entries, *x.shape[1:]))

    arrays: dict[str, jax.Array] = {}
    if problem.first and rows.first is not None:
        arrays["first"] = padded(spread(rows.first), 1, q_length, 0)
    if problem.last and rows.last is not None:
        arrays["last"] = padded(spread(rows.last), 1, q_length, -1)
    if call.q_segment_ids is not None and call.kv_segment_ids is not None:
        arrays["q_ids"] = padded(call.q_segment_ids, 1, q_length, -1)
        arrays["kv_ids"] = padded(call.kv_segment_ids, 1, problem.k_blocks * problem.blocks.k, -2)
    if ranges is not None:
        arrays["ranges"] = spread(ranges)
    return arrays


def _pairs(problem: Problem, call: Call) -> dict[str, jax.Array]:
    q_length, k_length = problem.q_blocks * problem.blocks.q, problem.k_blocks * problem.blocks.k
    arrays: dict[str, jax.Array] = {}
    if call.attention_mask is not None:
        arrays["mask"] = padded(padded(call.attention_mask.astype(jnp.int8), 2, q_length, 0), 3, k_length, 0)
    if call.bias is not None:
        by_row = call.bias.shape[2] > 1
        bias = padded(call.bias, 2, q_length, 0) if by_row else call.bias
        arrays["bias"] = padded(bias, 3, k_length, 0)
    return arrays


def _supported(settings: Settings, call: Call) -> Blocks:
    """The blocks of a call; raises NotImplementedError naming what the kernel does not take (S20)."""
    head_dim, value_dim = call.query.shape[3], call.value.shape[3]
    dtype = call.query.dtype.name
    if dtype not in ("bfloat16", "float16"):
        _refuse(f"{dtype} is not supported, bfloat16 and float16 are")
    blocks = settings.forward or choose(head_dim, is_plain(call))
    if head_dim not in head_dims() or blocks is None:
        known = ", ".join(str(dim) for dim in head_dims())
        _refuse(f"head_dim {head_dim} is not supported, {known} are")
    if value_dim != head_dim:
        _refuse(f"value head_dim {value_dim} with head_dim {head_dim} is not supported, equal ones are")
    if call.dropout_seed is not None:
        _refuse("dropout_prob above 0 is not supported")
    if not settings.normalize_output:
        _refuse("normalize_output=False is not supported")
    if settings.logits_dtype != "float32":
        _refuse(f"logits_dtype {settings.logits_dtype} is not supported, float32 is")
    return blocks


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"kernels.pallas.mosaic_gpu: {what}. Use kernels.triton or kernels.xla.")
