"""Shapes of query, key and value that Flax's attention functions do not take."""

import jax
import jax.numpy as jnp

# name: what differs from [1, 5, 2, 8], and how the refusal begins.
WRONG_SHAPES: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "no heads": ({"query": (5, 8)}, r"query: got shape \(5, 8\)"),
    "another rank": ({"key": (5, 2, 8)}, r"key: got shape \(5, 2, 8\); .* the batch \(1,\) of query"),
    "another batch": ({"value": (3, 5, 2, 8)}, r"value: got shape \(3, 5, 2, 8\)"),
    "another depth": ({"key": (1, 5, 2, 4)}, "key: got head dim 4; expected 8"),
    "another length": ({"value": (1, 6, 2, 8)}, r"value: got shape \(1, 6, 2, 8\)"),
    "other heads": ({"query": (1, 5, 3, 8)}, "query: got 3 heads with 2 key heads"),
    "no key heads": ({"key": (1, 5, 0, 8), "value": (1, 5, 0, 8)}, "query: got 2 heads with 0 key heads"),
}


def wrong_shapes(name: str) -> tuple[dict[str, jax.Array], str]:
    """The arrays, and a pattern of their refusal."""
    shapes, message = WRONG_SHAPES[name]
    arrays = {x: jnp.ones(shapes.get(x, (1, 5, 2, 8))) for x in ("query", "key", "value")}
    return arrays, f"^{message}"
