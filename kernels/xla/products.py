"""The four products of attention over one piece of a call, on arrays as they lie or copied by head.

Logits and what is like them are [b, H, q, k]: batch entries, query heads, queries and keys. A row is a query
of one of the heads that share a key head.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

# Einsums over b batch entries, h key heads, g query heads of a key head, q queries, k keys, c channels; r is
# g times q.
_IN_PLACE = {"scores": "bqhgc,bkhc->bhgqk", "rows": "bhgqk,bkhc->bqhgc", "keys": "bhgqk,bqhgc->bkhc"}
_BY_HEAD = {"scores": "bhrc,bhkc->bhrk", "rows": "bhrk,bhkc->bhrc", "keys": "bhrk,bhrc->bhkc"}


@dataclass(frozen=True)
class Products:
    """How products are computed; sums are float32.

    operands: the dtype of their operands. precision: of `jax.lax.dot_general`. by_head: whether queries, keys
    and values are copied into one array a head, which processors multiply faster; on accelerators the
    compiler chooses.
    """

    operands: Any
    precision: Any
    by_head: bool
    k_heads: int

    @property
    def rounds(self) -> bool:
        """Whether weights are rounded where they are multiplied."""
        return self.operands != jnp.float32

    def rows(self, x: jax.Array) -> jax.Array:
        """[b, q, H, c] as an operand with rows."""
        x = x.astype(self.operands).reshape(*x.shape[:2], self.k_heads, -1, x.shape[3])
        if not self.by_head:
            return x
        return x.transpose(0, 2, 3, 1, 4).reshape(x.shape[0], self.k_heads, -1, x.shape[4])

    def keys(self, x: jax.Array) -> jax.Array:
        """[b, k, h, c] as an operand with keys."""
        x = x.astype(self.operands)
        return x.transpose(0, 2, 1, 3) if self.by_head else x

    def scores(self, rows: jax.Array, keys: jax.Array, q: int) -> jax.Array:
        """The products of all rows and keys, [b, H, q, k], of q queries."""
        found = self._dot("scores", rows, keys)
        return found.reshape(found.shape[0], -1, q, found.shape[-1])

    def of_rows(self, weights: jax.Array, keys: jax.Array) -> jax.Array:
        """weights [b, H, q, k] times keys, as `by_token` takes it."""
        return self._dot("rows", self._weights(weights), keys)

    def of_rows_in_place(self, weights: jax.Array, keys: jax.Array) -> jax.Array:
        """The same of keys as the call has them, [b, k, h, c]."""
        axes = "bhrk,bkhc->bhrc" if self.by_head else _IN_PLACE["rows"]
        return self._einsum(axes, self._weights(weights), keys.astype(self.operands))

    def of_keys(self, weights: jax.Array, rows: jax.Array) -> jax.Array:
        """The transpose of weights [b, H, q, k] times rows: [b, k, h, c]."""
        found = self._dot("keys", self._weights(weights), rows)
        return found.transpose(0, 2, 1, 3) if self.by_head else found

    def per_row(self, x: jax.Array) -> jax.Array:
        """[b, H, q] as what broadcasts against an operand with rows."""
        grouped = x.reshape(x.shape[0], self.k_heads, -1, x.shape[2])
        if self.by_head:
            return grouped.reshape(x.shape[0], self.k_heads, -1, 1)
        return grouped.transpose(0, 3, 1, 2)[..., None]

    def by_token(self, x: jax.Array, heads: int) -> jax.Array:
        """[b, q, H, c] of what has rows."""
        if not self.by_head:
            return x.reshape(*x.shape[:2], heads, x.shape[4])
        return x.reshape(x.shape[0], heads, -1, x.shape[3]).transpose(0, 2, 1, 3)

    def _weights(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.operands)
        if self.by_head:
            return x.reshape(x.shape[0], self.k_heads, -1, x.shape[3])
        return x.reshape(x.shape[0], self.k_heads, -1, *x.shape[2:])

    def _dot(self, name: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._einsum((_BY_HEAD if self.by_head else _IN_PLACE)[name], a, b)

    def _einsum(self, axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(axes, a, b, precision=self.precision, preferred_element_type=jnp.float32)
