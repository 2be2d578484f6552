"""The shapes of the arrays that the Hopper kernels fill."""

import jax
import jax.numpy as jnp

from attest.kernels.call.call import Call
from attest.kernels.pallas.mosaic_gpu.launch.transfers import operand_shape
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import Outputs
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec


def of_row(spec: KernelSpec) -> jax.ShapeDtypeStruct:
    """Return the shape of one number for each query and head, float32, up to the end of a block."""
    shape = spec.shape
    return jax.ShapeDtypeStruct((shape.entries, shape.heads, shape.padded_q_length), jnp.float32)


def of_key(spec: KernelSpec) -> jax.ShapeDtypeStruct:
    """Return the shape of one number for each key and key head, float32, up to the end of a block."""
    shape = spec.shape
    return jax.ShapeDtypeStruct((shape.batch, shape.key_heads, shape.padded_k_length), jnp.float32)


def of_queries(spec: KernelSpec, query: jax.Array, channels: int, head_dim: int) -> jax.ShapeDtypeStruct:
    """Return the shape of out, or of the gradient of query. channels: of the result, without padding."""
    return _of_tensor(spec, query.shape[:3], channels, head_dim, spec.shape.padded_q_length)


def of_keys(spec: KernelSpec, call: Call) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the gradients of key and value, by name."""
    padded = spec.shape.padded_k_length
    return {
        "d_key": _of_tensor(spec, call.key.shape[:3], call.key.shape[3], spec.shape.head_dim, padded),
        "d_value": _of_tensor(spec, call.value.shape[:3], call.value.shape[3], spec.shape.value_dim, padded),
    }


def with_leak(spec: KernelSpec, outputs: Outputs, leak: jax.ShapeDtypeStruct) -> Outputs:
    """Return the outputs, and where pairs may be hidden, which rows are not finite."""
    return {**outputs, "leak": leak} if spec.hides else outputs


def _of_tensor(
    spec: KernelSpec, rows: tuple[int, ...], channels: int, head_dim: int, padded: int
) -> jax.ShapeDtypeStruct:
    """Return the shape of a result of rows [B, S, H]. padded: the length of an unrounded one.

    Unrounded results are written from registers, up to the end of a block and of a tile's row. The TMA unit
    writes the others, no row past the end.
    """
    batch, length, heads = rows
    if spec.results.unrounded:
        length, channels = padded, head_dim
    shape = operand_shape(spec.result_dtype, (batch, length, heads, channels), head_dim)
    return jax.ShapeDtypeStruct(shape, spec.result_dtype)
