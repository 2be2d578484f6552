"""The inputs of a contender, and the operations that they count as.

An operation count is that of the two products of the forward pass over the visible pairs, 4 * head_dim a pair
and head; the backward pass has five products, so both passes count 3.5 times the forward one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FORWARD = "forward"
FORWARD_BACKWARD = "forward_backward"
DIRECTIONS = (FORWARD, FORWARD_BACKWARD)
PRODUCTS = {FORWARD: 1.0, FORWARD_BACKWARD: 3.5}

type Inputs = dict[str, jax.Array]
type Attend = Callable[[Inputs], jax.Array]


@dataclass(frozen=True)
class Problem:
    """One self-attention in bfloat16; features are off by default.

    segment: length of the equal segments that each sequence is packed from. window: keys a query sees, itself
    and those before it. sinks: sink logits a head. bias: one of [1, heads, length, length].
    """

    batch: int
    length: int
    heads: int
    head_dim: int
    key_heads: int | None = None
    causal: bool = False
    segment: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: int = 0
    bias: bool = False
    dropout: float = 0.0

    @property
    def shape(self) -> str:
        return f"({self.batch}, {self.length}, {self.heads}, {self.head_dim})"


def visible_pairs(problem: Problem) -> int:
    """Pairs of a query and a key that it sees, over the batch and the query heads."""
    row = np.arange(problem.length)
    segment = problem.segment or problem.length
    first = row // segment * segment
    last = np.minimum(first + segment, problem.length) - 1
    if problem.causal:
        last = row
    if problem.window is not None:
        first = np.maximum(first, row - problem.window + 1)
    return problem.batch * problem.heads * int((last - first + 1).sum())


def operations(problem: Problem, direction: str) -> float:
    return 4.0 * problem.head_dim * visible_pairs(problem) * PRODUCTS[direction]


@partial(jax.jit, static_argnums=0)
def draw(problem: Problem) -> Inputs:
    """Normal query, key, value and cotangent, and what the features need, made on the device."""
    names = ("query", "key", "value", "d_out", "bias", "sinks")
    keys = dict(zip(names, jax.random.split(jax.random.key(0), len(names)), strict=True))
    tokens = (problem.batch, problem.length)
    key_heads = problem.key_heads or problem.heads
    shapes: dict[str, tuple[int, ...]] = {
        "query": (*tokens, problem.heads, problem.head_dim),
        "key": (*tokens, key_heads, problem.head_dim),
        "value": (*tokens, key_heads, problem.head_dim),
        "d_out": (*tokens, problem.heads, problem.head_dim),
    }
    if problem.bias:
        shapes["bias"] = (1, problem.heads, problem.length, problem.length)
    if problem.sinks:
        shapes["sinks"] = (problem.heads, problem.sinks)
    inputs = {name: jax.random.normal(keys[name], shape, jnp.bfloat16) for name, shape in shapes.items()}
    if problem.segment is not None:
        ids = jnp.arange(problem.length, dtype=jnp.int32) // problem.segment
        inputs["segments"] = jnp.broadcast_to(ids, tokens)
    if problem.dropout:
        inputs["seed"] = jnp.array([7, 0], jnp.uint32)
    return inputs


def gradients(attend: Attend) -> Callable[[Inputs], tuple[jax.Array, ...]]:
    """The gradients of query, key and value for the drawn cotangent, which XLA cannot simplify."""

    def of_inputs(inputs: Inputs) -> tuple[jax.Array, ...]:
        def output(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return attend(inputs | {"query": query, "key": key, "value": value})

        _, pull = jax.vjp(output, inputs["query"], inputs["key"], inputs["value"])
        return pull(inputs["d_out"])

    return of_inputs


def ready(function: Callable[[Inputs], Any], inputs: Inputs) -> Callable[[], Any]:
    """Compiled for these inputs and run once, since jaxlib assembles Triton's PTX at the first launch."""
    program = jax.jit(function).lower(inputs).compile()
    jax.block_until_ready(program(inputs))
    return partial(program, inputs)
