# /// script
# requires-python = ">=3.12"
# dependencies = ["ejkernel==0.0.80.3", "jax==0.10.2", "numpy==2.5.5"]
# ///
"""Show documented arguments that ejKernel refuses or ignores in XLA; exit status 1: shown."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.kernels._xla.attention import attention
from ejkernel.kernels._xla.flash_attention import flash_attention
from ejkernel.kernels._xla.ring_attention import ring_attention

RAMP = jnp.arange(4.0).reshape(1, 4, 1, 1)


def refused(what, function, *arrays, **options):
    try:
        function(*arrays, **options)
    except Exception as error:  # their types are part of the finding
        print(f"{function.__name__}, {what}: {type(error).__name__}")
        return True
    return False


def exact_gradients():
    """Return the gradients of a bias and a sink, both of 0, in float64, for an output gradient of 1."""
    values = np.arange(4.0)
    logits = np.concatenate([np.outer(values, values), np.zeros((4, 1))], -1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = np.append(values, 0.0)
    d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    return d_logits[:, :-1], d_logits[:, -1].sum()


def no_gradient(function):
    def loss(bias, sinks):
        return function(RAMP, RAMP, RAMP, bias=bias, softmax_aux=sinks).sum()

    found = jax.grad(loss, argnums=(0, 1))(jnp.zeros((1, 1, 4, 4)), jnp.zeros(1))
    print(
        f"{function.__name__}, largest gradients of bias and sink:",
        [float(jnp.abs(x).max()) for x in found],
        "expected:",
        [round(float(np.abs(x).max()), 4) for x in exact_gradients()],
    )
    return all(bool((x == 0).all()) for x in found)


def ignored(what, function, given, others):
    same = bool((function(RAMP, RAMP, RAMP, **others) == function(RAMP, RAMP, RAMP, **others, **given)).all())
    print(f"{function.__name__}, {what} is ignored: {same}")
    return same


if __name__ == "__main__":
    grouped = jnp.ones((1, 4, 2, 2)), jnp.ones((1, 4, 1, 2)), jnp.ones((1, 4, 1, 2))
    two_sequences = {f"cum_seqlens_{side}": jnp.array([0, 2, 4]) for side in "qk"}
    every_pair = jnp.ones((1, 1, 4, 4), bool)
    found = [
        refused("2 query heads and 1 KV head", ring_attention, *grouped),
        refused("sinks of each head", flash_attention, RAMP, RAMP, RAMP, softmax_aux=jnp.zeros((1, 2))),
        refused("sinks of each head", attention, RAMP, RAMP, RAMP, softmax_aux=jnp.zeros((1, 2))),
        ignored("cum_seqlens beside a mask", flash_attention, two_sequences, {"attention_mask": every_pair}),
        ignored(
            "q_position_ids alone",
            ring_attention,
            {"q_position_ids": jnp.array([[3, 2, 1, 0]])},
            {"causal": True},
        ),
        no_gradient(flash_attention),
        no_gradient(ring_attention),
    ]
    sys.exit(int(any(found)))
