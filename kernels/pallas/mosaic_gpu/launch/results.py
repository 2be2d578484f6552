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


def of_queries(spec: KernelSpec, shape: tuple[int, ...], width: int) -> jax.ShapeDtypeStruct:
    """Return the shape of out, or of the gradient of query, [B, S, H, D] from tiles `width` wide."""
    return _of_tensor(spec, shape, width, spec.shape.padded_q_length)


def of_keys(spec: KernelSpec, call: Call) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the gradients of key and value, by name."""
    padded = spec.shape.padded_k_length
    return {
        "d_key": _of_tensor(spec, call.key.shape, spec.shape.head_dim, padded),
        "d_value": _of_tensor(spec, call.value.shape, spec.shape.value_dim, padded),
    }


def with_leak(spec: KernelSpec, outputs: Outputs, leak: jax.ShapeDtypeStruct) -> Outputs:
    """Return the outputs, and where pairs may be hidden, which rows are not finite."""
    return {**outputs, "leak": leak} if spec.hides else outputs


def _of_tensor(spec: KernelSpec, shape: tuple[int, ...], width: int, padded: int) -> jax.ShapeDtypeStruct:
    """Return the shape of a result [B, S, H, D] from tiles `width` wide. padded: its length if unrounded.

    Unrounded results are written from registers, up to the end of a block and of a tile's row. The TMA unit
    writes the others, no row past the end.
    """
    if spec.shape.pieces and not spec.results.unrounded:
        return jax.ShapeDtypeStruct(shape, spec.result_dtype)
    batch, _, heads, _ = shape
    whole = (batch, padded, heads, width) if spec.results.unrounded else shape
    return jax.ShapeDtypeStruct(operand_shape(spec.result_dtype, whole, width), spec.result_dtype)
