"""The arrays that the Hopper kernels fill."""

import jax
import jax.numpy as jnp

from attest.kernels.arguments import Call
from attest.kernels.pallas.mosaic_gpu.launch import Outputs
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.transfers import operand_shape


def of_row(spec: KernelSpec) -> jax.ShapeDtypeStruct:
    """Return a number for each query and head, float32, in whole blocks."""
    return jax.ShapeDtypeStruct((spec.entries, spec.heads, spec.q_blocks * spec.q_block), jnp.float32)


def of_key(spec: KernelSpec) -> jax.ShapeDtypeStruct:
    """Return a number for each key and key head, float32, in whole blocks."""
    return jax.ShapeDtypeStruct((spec.batch, spec.key_heads, spec.k_blocks * spec.k_block), jnp.float32)


def of_queries(spec: KernelSpec, query: jax.Array, head_dim: int) -> jax.ShapeDtypeStruct:
    """Return out, or the gradient of query."""
    return _of_tensor(spec, query, head_dim, spec.q_blocks * spec.q_block)


def of_keys(spec: KernelSpec, call: Call) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the gradients of key and value, by name."""
    whole_blocks = spec.k_blocks * spec.k_block
    return {
        "d_key": _of_tensor(spec, call.key, spec.head_dim, whole_blocks),
        "d_value": _of_tensor(spec, call.value, spec.value_dim, whole_blocks),
    }


def with_leak(spec: KernelSpec, outputs: Outputs, leak: jax.ShapeDtypeStruct) -> Outputs:
    """Return the outputs, and where pairs may be hidden, which rows are not finite."""
    return {**outputs, "leak": leak} if spec.hides else outputs


def _of_tensor(spec: KernelSpec, x: jax.Array, head_dim: int, whole_blocks: int) -> jax.ShapeDtypeStruct:
    """A result for each row and head of an array. whole_blocks: the length that unrounded ones have.

    Those are written from registers, in whole blocks. The TMA unit writes the others, no row past the end.
    """
    batch, length, heads, _ = x.shape
    shape = (batch, whole_blocks if spec.unrounded else length, heads, head_dim)
    return jax.ShapeDtypeStruct(operand_shape(spec.result_dtype, shape), spec.result_dtype)
