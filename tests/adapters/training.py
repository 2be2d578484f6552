"""Small models of two layers whose attention is given, and their losses while they are trained."""

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SETTINGS = tomllib.loads((Path(__file__).parent / "training.toml").read_text())
BATCH, LENGTH, TOKENS, FEATURES, HEADS = 8, 12, 11, 32, 4
HEAD_DIM = FEATURES // HEADS
RATE = 0.01

type Loss = Callable[[Any, jax.Array], jax.Array]


def losses(loss: Loss, parameters: Any, mesh: Any = None) -> np.ndarray:
    """The losses of some steps of Adam; each token is the one three places before.

    mesh: with axes "data" and "model"; splits the batch, and parameters where `spec` says so.
    """
    first = np.random.default_rng(0).integers(0, TOKENS, (SETTINGS["steps"], BATCH, 3))
    places = np.arange(LENGTH + 1)
    batches = jnp.asarray(first[..., places % 3], jnp.int32)
    if mesh is not None:
        parameters = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), parameters)
        batches = jax.device_put(batches, NamedSharding(mesh, P(None, "data")))

    def step(state: Any, batch: tuple[jax.Array, jax.Array]) -> Any:
        number, tokens = batch
        value, gradient = jax.value_and_grad(loss)(state[0], tokens)
        moved = jax.tree.map(partial(_adam, number), gradient, *state)
        return jax.tree.transpose(jax.tree.structure(gradient), jax.tree.structure((0, 0, 0)), moved), value

    def train(parameters: Any, batches: jax.Array) -> jax.Array:
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        numbers = jnp.arange(1, SETTINGS["steps"] + 1)
        return jax.lax.scan(step, (parameters, zeros, zeros), (numbers, batches))[1]

    return np.asarray(jax.jit(train)(parameters, batches))


def _adam(number: Any, gradient: Any, parameter: Any, mean: Any, square: Any) -> tuple[Any, Any, Any]:
    """One parameter after a step of Adam, and the running means of its gradient and of its square."""
    mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
    direction = mean / (1 - 0.9**number) / (jnp.sqrt(square / (1 - 0.99**number)) + 1e-6)
    return parameter - RATE * direction, mean, square


def spec(x: jax.Array) -> P:
    """How a parameter is split: heads over "model", in the layouts of the libraries."""
    if x.shape == (FEATURES, FEATURES):
        return P("model")
    return P(*("model" if size == HEADS and x.ndim > 2 else None for size in x.shape))


def agree(found: np.ndarray, want: np.ndarray) -> None:
    """Hold two curves of losses together; the model must learn."""
    assert want[-1] < SETTINGS["learnt"] * want[0], want
    np.testing.assert_allclose(found, want, rtol=SETTINGS["relative"], atol=0)


def of_logits(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    chosen = jax.nn.log_softmax(logits) * jax.nn.one_hot(tokens[:, 1:], TOKENS)
    return -chosen.sum(axis=-1).mean()


class NnxModel(nnx.Module):
    """Two layers of Flax."""

    def __init__(self, rngs: nnx.Rngs, **options: Any) -> None:
        normal = nnx.initializers.normal(0.5)
        self.token = nnx.Embed(TOKENS, FEATURES, embedding_init=normal, rngs=rngs)
        self.place = nnx.Embed(LENGTH, FEATURES, embedding_init=normal, rngs=rngs)
        self.attention = nnx.List(
            [nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=rngs, **options) for _ in range(2)]
        )
        self.linear = nnx.List([nnx.Linear(FEATURES, FEATURES, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(FEATURES, TOKENS, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens) + self.place(jnp.arange(LENGTH))
        for attention, linear in zip(self.attention, self.linear, strict=True):
            x = x + attention(x, is_causal=True)
            x = x + nnx.relu(linear(x))
        return self.head(x)


def of_nnx(**options: Any) -> tuple[Loss, Any]:
    graph, parameters = nnx.split(NnxModel(nnx.Rngs(0), **options))
    return lambda parameters, tokens: of_logits(
        nnx.merge(graph, parameters)(tokens[:, :-1]), tokens
    ), parameters


class EquinoxModel(eqx.Module):
    """Two layers of Equinox, for one sequence."""

    token: eqx.nn.Embedding
    place: eqx.nn.Embedding
    attention: list[eqx.nn.MultiheadAttention]
    linear: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = iter(jax.random.split(key, 7))
        self.token = eqx.nn.Embedding(TOKENS, FEATURES, key=next(keys))
        self.place = eqx.nn.Embedding(LENGTH, FEATURES, key=next(keys))
        self.attention = [eqx.nn.MultiheadAttention(HEADS, FEATURES, key=next(keys)) for _ in range(2)]
        self.linear = [eqx.nn.Linear(FEATURES, FEATURES, key=next(keys)) for _ in range(2)]
        self.head = eqx.nn.Linear(FEATURES, TOKENS, key=next(keys))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.token)(tokens) + jax.vmap(self.place)(jnp.arange(LENGTH))
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        for attention, linear in zip(self.attention, self.linear, strict=True):
            x = x + attention(x, x, x, mask=mask)
            x = x + jax.nn.relu(jax.vmap(linear)(x))
        return jax.vmap(self.head)(x)


def of_equinox(change: Callable[[Any], Any] = lambda model: model) -> tuple[Loss, Any]:
    parameters, static = eqx.partition(change(EquinoxModel(jax.random.key(0))), eqx.is_array)

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        return of_logits(jax.vmap(eqx.combine(parameters, static))(tokens[:, :-1]), tokens)

    return loss, parameters


def of_function(attend: Callable[..., jax.Array]) -> tuple[Loss, Any]:
    """Two layers that call attention on query, key and value [batch, length, heads, head_dim]."""
    keys = iter(jax.random.split(jax.random.key(0), 11))

    def weights(*shape: int, inputs: int = FEATURES) -> jax.Array:
        return jax.random.normal(next(keys), shape) * inputs**-0.5

    layers = [
        {"qkv": weights(FEATURES, 3, HEADS, HEAD_DIM), "out": weights(HEADS, HEAD_DIM, FEATURES)}
        for _ in range(2)
    ]
    parameters = {
        "token": weights(TOKENS, FEATURES, inputs=4),
        "place": weights(LENGTH, FEATURES, inputs=4),
        "layers": layers,
        "head": weights(FEATURES, TOKENS),
    }

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        x = parameters["token"][tokens[:, :-1]] + parameters["place"]
        for layer in parameters["layers"]:
            query, key, value = jnp.einsum("bsf,fchd->cbshd", x, layer["qkv"])
            x = x + jnp.einsum("bshd,hdf->bsf", attend(query, key, value), layer["out"])
        return of_logits(x @ parameters["head"], tokens)

    return loss, parameters
