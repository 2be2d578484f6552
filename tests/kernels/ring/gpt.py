"""A small causal language model whose attention is given, and its losses while it is trained.

Two layers of attention and a perceptron. Each token is the one three places before, so that attention has
something to learn. The model is smooth: at the kink of a ReLU one rounding changes a gradient by 100 %, and
after 30 steps two trainings of float32 differ by 1e-3.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attest.kernels.ring import ring_attention

STEPS, BATCH, LENGTH, TOKENS, LAYERS = 50, 2, 64, 11, 2
FEATURES, HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 4, 4
RATE = 0.01
# The mesh axis over which sequences are spread.
AXIS = "sequence"

# query, key and value as `ring_attention` takes them, and the words of the seed of dropout
type Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
type Parameters = dict[str, Any]


def mesh_of(devices: int) -> Any:
    """A mesh of so many devices of this process, along `AXIS`."""
    used = jax.devices()[:devices]
    return jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=used)


def attend_in(dtype: Any, **options: Any) -> Attend:
    """Return ring attention in a dtype, in causal order and with dropout; its result is float32."""

    def call(query: jax.Array, key: jax.Array, value: jax.Array, seed: jax.Array) -> jax.Array:
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        given = {"causal": True, "dropout_prob": 0.1, "platform": "xla", **options}
        return ring_attention(query, key, value, dropout_seed=seed, **given).astype(jnp.float32)

    return call


def losses(attend: Attend, mesh: Any = None) -> np.ndarray:
    """Return the loss of each step of Adam.

    attend: attention in causal order. mesh: with the axis `AXIS`; the whole model then runs on the part of
    the sequences that a device has, inside of `jax.shard_map`.
    """
    first = np.random.default_rng(0).integers(0, TOKENS, (STEPS, BATCH, 3))
    text = jnp.asarray(first[..., np.arange(LENGTH + 1) % 3], jnp.int32)
    places = jnp.arange(LENGTH, dtype=jnp.int32)

    def local(
        parameters: Parameters, text: jax.Array, wanted: jax.Array, places: jax.Array, step: Any
    ) -> Any:
        logits = model(parameters, attend, text, places, step)
        chosen = jax.nn.log_softmax(logits) * jax.nn.one_hot(wanted, TOKENS)
        total = -chosen.sum() / (BATCH * LENGTH)
        return total if mesh is None else lax.psum(total, AXIS)

    loss = local
    if mesh is not None:
        part = P(None, AXIS)
        loss = jax.shard_map(local, mesh=mesh, in_specs=(P(), part, part, P(AXIS), P()), out_specs=P())

    def update(state: Any, batch: Any) -> Any:
        step, text = batch
        value, gradient = jax.value_and_grad(loss)(state[0], text[:, :-1], text[:, 1:], places, step)
        moved = jax.tree.map(partial(_adam, step), gradient, *state)
        return jax.tree.transpose(jax.tree.structure(gradient), jax.tree.structure((0, 0, 0)), moved), value

    def train(parameters: Parameters, text: jax.Array) -> jax.Array:
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        steps = jnp.arange(1, STEPS + 1, dtype=jnp.int32)
        return lax.scan(update, (parameters, zeros, zeros), (steps, text))[1]

    return np.asarray(jax.jit(train)(_parameters(), text))


def model(
    parameters: Parameters, attend: Attend, tokens: jax.Array, places: jax.Array, step: jax.Array
) -> jax.Array:
    """Return the logits [B, S, TOKENS] of the next token; each layer of each step drops other pairs."""
    x = parameters["token"][tokens] + parameters["place"][places][None]
    for number, layer in enumerate(parameters["layers"]):
        query, key, value = (
            jnp.einsum("bsf,fhd->bshd", x, layer[name]) for name in ("query", "key", "value")
        )
        seed = jnp.stack((step, jnp.full_like(step, number))).astype(jnp.uint32)
        out = attend(query, key, value, seed)
        x = x + jnp.einsum("bshd,hdf->bsf", out, layer["out"])
        x = x + jax.nn.silu(x @ layer["up"]) @ layer["down"]
    return x @ parameters["head"]


def _parameters() -> Parameters:
    keys = iter(jax.random.split(jax.random.key(0), 3 + 6 * LAYERS))

    def weights(*shape: int, inputs: int = FEATURES) -> jax.Array:
        return jax.random.normal(next(keys), shape) * inputs**-0.5

    shapes: Mapping[str, tuple[int, ...]] = {
        "query": (FEATURES, HEADS, HEAD_DIM),
        "key": (FEATURES, KEY_HEADS, HEAD_DIM),
        "value": (FEATURES, KEY_HEADS, HEAD_DIM),
        "out": (HEADS, HEAD_DIM, FEATURES),
        "up": (FEATURES, FEATURES),
        "down": (FEATURES, FEATURES),
    }
    return {
        "token": weights(TOKENS, FEATURES, inputs=4),
        "place": weights(LENGTH, FEATURES, inputs=4),
        "layers": [{name: weights(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)],
        "head": weights(FEATURES, TOKENS),
    }


def _adam(step: Any, gradient: Any, parameter: Any, mean: Any, square: Any) -> tuple[Any, Any, Any]:
    """One parameter after a step of Adam, and the running means of its gradient and of its square."""
    mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
    number = step.astype(jnp.float32)
    direction = mean / (1 - 0.9**number) / (jnp.sqrt(square / (1 - 0.99**number)) + 1e-6)
    return parameter - RATE * direction, mean, square
