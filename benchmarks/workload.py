"""Programs of workloads: the directions that are timed, and their count of operations.

The count is that of the two products of the forward pass over the visible pairs, 2 * (head_dim + value_dim) a
pair and head; the backward pass has five products, so forward and backward count 3.5 times forward alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from attest.conformance.tuning.workload import Inputs, Workload

FORWARD = "forward"
FORWARD_BACKWARD = "forward_backward"
DIRECTIONS = (FORWARD, FORWARD_BACKWARD)
PRODUCTS = {FORWARD: 1.0, FORWARD_BACKWARD: 3.5}

type Attend = Callable[[Inputs], jax.Array]
type Gradients = tuple[jax.Array, jax.Array, jax.Array]  # of query, key and value


def visible_pairs(workload: Workload) -> int:
    """Return how many pairs of a query and a key that it sees there are, over batch and query heads."""
    keys = workload.key_lengths[:, None]
    row = np.arange(workload.length)[None, :]
    first, last = np.zeros_like(row), keys - 1
    if workload.segment is not None:
        first = row // workload.segment * workload.segment
        last = np.minimum(first + workload.segment, keys) - 1
    diagonal = row + (keys if workload.lengths else workload.keys) - workload.length
    if workload.causal:
        last = np.minimum(last, diagonal)
    if workload.window is not None:
        first = np.maximum(first, diagonal - workload.window + 1)
        last = np.minimum(last, diagonal + workload.after)
    if workload.chunk is not None:
        first = np.maximum(first, diagonal // workload.chunk * workload.chunk)
        last = np.minimum(last, (diagonal // workload.chunk + 1) * workload.chunk - 1)
    return workload.heads * int(np.maximum(last - first + 1, 0).sum())


def operations(workload: Workload, direction: str) -> float:
    """Return the operations that one call counts as."""
    width = workload.head_dim + (workload.value_dim or workload.head_dim)
    return 2.0 * width * visible_pairs(workload) * PRODUCTS[direction]


def with_gradients(attend: Attend) -> Callable[[Inputs], tuple[jax.Array, Gradients]]:
    """Return the output, as training needs it, and its gradients for a drawn cotangent."""

    def of_inputs(inputs: Inputs) -> tuple[jax.Array, Gradients]:
        def output(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return attend(inputs | {"query": query, "key": key, "value": value})

        out, pull = jax.vjp(output, inputs["query"], inputs["key"], inputs["value"])
        return out, pull(inputs["d_out"])

    return of_inputs


def in_direction(attend: Attend, direction: str) -> Callable[[Inputs], Any]:
    """Return what is timed: the output, and with it the gradients in the other direction."""
    return attend if direction == FORWARD else with_gradients(attend)


def ready(function: Callable[[Inputs], Any], inputs: Inputs) -> Callable[[], Any]:
    """Return the program for these inputs, run once: jaxlib assembles Triton's PTX at the first launch."""
    program = jax.jit(function).lower(inputs).compile()
    jax.block_until_ready(program(inputs))
    return partial(program, inputs)
