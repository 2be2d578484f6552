"""The four products of attention over one piece of a call, on arrays as they lie or copied by head.

Logits and what is like them are [b, H, q, k]: batch entries, query heads, queries and keys. A row is a query
of one of the heads that share a key head. Nothing here has more than four axes, as a compiler that sees the
logits with a fifth one makes no single kernel of a softmax.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Elements of both operands; XLA's own limit, the flag xla_gpu_gemm_rewrite_size_threshold, is 100.
_SMALL = 256


@dataclass(frozen=True)
class Products:
    """The arithmetic of products; sums are float32.

    operands: the dtype of their operands. precision: of `jax.lax.dot_general`. k_heads, group: how many key
    heads there are, and query heads of each. by_head: whether queries, keys and values are copied into one
    array a head, which processors multiply faster; on accelerators the compiler chooses.
    """

    operands: Any
    precision: Any
    k_heads: int
    group: int
    by_head: bool

    @property
    def rounds(self) -> bool:
        """Whether weights are rounded where they are multiplied."""
        return self.operands != jnp.float32

    def rows(self, x: jax.Array) -> jax.Array:
        """Return [b, q, H, c] as an operand with rows."""
        x = x.astype(self.operands)
        if not self._rows_by_head:
            return x
        x = x.reshape(*x.shape[:2], self.k_heads, self.group, x.shape[3])
        return x.transpose(0, 2, 3, 1, 4).reshape(x.shape[0], self.k_heads, -1, x.shape[4])

    def keys(self, x: jax.Array) -> jax.Array:
        """Return [b, k, h, c] as an operand with keys."""
        x = x.astype(self.operands)
        return x.transpose(0, 2, 1, 3) if self.by_head else x

    def scores(self, rows: jax.Array, keys: jax.Array) -> jax.Array:
        """Return the products of all rows and keys, [b, H, q, k]."""
        found = self._einsum(f"{self._rows},{self._keys}->bhrk", rows, keys)
        return found.reshape(found.shape[0], self.k_heads * self.group, -1, found.shape[3])

    def of_rows(self, weights: jax.Array, keys: jax.Array) -> jax.Array:
        """Return weights [b, H, q, k] times keys, as `by_token` takes it."""
        return self._einsum(f"bhrk,{self._keys}->{self._rows}", self._weights(weights), keys)

    def of_rows_in_place(self, weights: jax.Array, keys: jax.Array) -> jax.Array:
        """Return the same of keys as the call has them, [b, k, h, c]."""
        return self._einsum(f"bhrk,bkhc->{self._rows}", self._weights(weights), keys.astype(self.operands))

    def of_keys(self, weights: jax.Array, rows: jax.Array) -> jax.Array:
        """Return the transpose of weights [b, H, q, k] times rows: [b, k, h, c]."""
        found = self._einsum(f"bhrk,{self._rows}->{self._keys}", self._weights(weights), rows)
        return found.transpose(0, 2, 1, 3) if self.by_head else found

    def per_row(self, x: jax.Array) -> jax.Array:
        """Return [b, H, q] as what broadcasts against an operand with rows."""
        if self._rows_by_head:
            return x.reshape(x.shape[0], self.k_heads, -1, 1)
        return x.transpose(0, 2, 1)[..., None]

    def by_token(self, x: jax.Array) -> jax.Array:
        """Return [b, q, H, c] of what has rows."""
        if not self._rows_by_head:
            return x
        return x.reshape(x.shape[0], self.k_heads * self.group, -1, x.shape[3]).transpose(0, 2, 1, 3)

    @property
    def _rows_by_head(self) -> bool:
        return self.by_head or self.group > 1

    @property
    def _rows(self) -> str:
        return "bhrc" if self._rows_by_head else "brhc"

    @property
    def _keys(self) -> str:
        return "bhkc" if self.by_head else "bkhc"

    def _weights(self, x: jax.Array) -> jax.Array:
        return x.astype(self.operands).reshape(x.shape[0], self.k_heads, -1, x.shape[3])

    def _einsum(self, axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
        wide, precision = jnp.dtype(jnp.float32), self.precision
        if self.rounds and _is_small(axes, a, b):
            a, b, precision = a.astype(wide), b.astype(wide), lax.Precision.HIGHEST
        return jnp.einsum(axes, a, b, precision=precision, preferred_element_type=wide)


def _is_small(axes: str, a: jax.Array, b: jax.Array) -> bool:
    """Return whether a matrix of the product may be too small for XLA's matrix multiplication on GPUs.

    XLA multiplies such operands one by one, and in float16 it rounds each product to float16 (seen in jax
    0.11.2). It counts the elements of both matrices, without their batch axes.
    """
    left, right = axes.partition("->")[0].split(",")
    batch = set(left) & set(axes.partition("->")[2]) & set(right)
    elements = sum(
        math.prod(size for axis, size in zip(names, x.shape, strict=True) if axis not in batch)
        for names, x in ((left, a), (right, b))
    )
    return elements < _SMALL


def products_of(call: Any, precision: Any, *, wide: bool) -> Products:
    """Return the products of a call: on a CPU, of inputs widened to float32, elsewhere as they are."""
    k_heads = call.key.shape[2]
    operands = jnp.dtype(jnp.float32) if wide else call.query.dtype
    return Products(operands, precision, k_heads, call.query.shape[2] // k_heads, by_head=wide)
