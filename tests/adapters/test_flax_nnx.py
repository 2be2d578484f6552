"""Our `attention_fn` in Flax's nnx layers, against Flax's own."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attest.kernels.adapters.flax_nnx import dot_product_attention
from tests.adapters.roundings import check, our_bernoulli
from tests.adapters.wrong_shapes import WRONG_SHAPES, wrong_shapes
from tests.kernels.kernel_cases import normal, qkv

X = normal(2, 9, 16)
KEYS = normal(2, 12, 16)
CAUSAL = nnx.make_causal_mask(jnp.ones((2, 9)))  # floats of 0 and 1
OF_KEYS = (np.arange(12) < np.array([[12], [6]]))[:, None, None]
# name: options of the layer, inputs, options of the call.
LAYERS: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "plain": ({}, (X,), {}),
    "a causal mask": ({}, (X,), {"mask": CAUSAL}),
    "causal": ({}, (X,), {"is_causal": True}),
    "causal from the first key": ({}, (X, KEYS), {"is_causal": True}),
    "causal and a mask of keys": ({}, (X, KEYS), {"is_causal": True, "mask": np.repeat(OF_KEYS, 9, 2)}),
    "shared keys": ({"num_kv_heads": 2}, (X,), {"is_causal": True}),
    "normalised queries and keys": ({"normalize_qk": True}, (X,), {"mask": CAUSAL}),
    "no batch": ({}, (X[0],), {"mask": CAUSAL[0]}),
    "two batch dimensions": ({}, (normal(2, 3, 9, 16),), {}),
    "dropout that is off": ({"dropout_rate": 0.5, "deterministic": True}, (X,), {"is_causal": True}),
}


def layer(**options: Any) -> Any:
    return nnx.MultiHeadAttention(4, 16, 32, **{"decode": False, **options}, rngs=nnx.Rngs(0, dropout=7))


def applied(**options: Any) -> tuple[Callable[..., Any], Any]:
    """A layer as a function of its parameters and inputs, and the parameters."""
    graph, found, rest = nnx.split(layer(**options), nnx.Param, ...)
    # Biases are zeros at first.
    found = jax.tree.map(lambda x: x + 0.1 * normal(*x.shape), found)

    def apply(parameters: Any, *inputs: Any, **call: Any) -> Any:
        return nnx.merge(graph, parameters, rest, copy=True)(*inputs, **call)

    return apply, found


def test_the_signature_is_that_of_flax() -> None:
    ours, theirs = (
        [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]
        for function in (dot_product_attention, nnx.dot_product_attention)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_that_of_flax(name: str) -> None:
    options, inputs, call = LAYERS[name]
    ours, parameters = applied(**options, attention_fn=dot_product_attention)
    theirs, _ = applied(**options)
    check(lambda *x: ours(*x, **call), lambda *x: theirs(*x, **call), parameters, *inputs)


def test_a_layer_in_bfloat16() -> None:
    ours, parameters = applied(dtype=jnp.bfloat16, attention_fn=dot_product_attention)
    theirs, _ = applied(dtype=jnp.float64)
    assert ours(parameters, X).dtype == jnp.bfloat16
    check(
        lambda *x: ours(*x, is_causal=True).astype("float32"),
        lambda *x: theirs(*x, is_causal=True),
        parameters,
        X,
        dtype="bfloat16",
    )


@pytest.mark.found_outside
@pytest.mark.parametrize(
    "broadcast", [{}, {"broadcast_dropout": True}, {"broadcast_dropout": False}], ids=str
)
@pytest.mark.parametrize("heads", [{}, {"num_kv_heads": 2}], ids=str)
def test_dropout_is_that_of_flax_with_our_choice_of_weights(
    monkeypatch: pytest.MonkeyPatch, broadcast: dict[str, Any], heads: dict[str, Any]
) -> None:
    """Flax shares one mask by default; one of ours of a single batch entry and head is what it then draws."""
    options: Any = {"dropout_rate": 0.4, "deterministic": False, **broadcast, **heads}
    ours, parameters = applied(**options, attention_fn=dot_product_attention)
    theirs, _ = applied(**options)
    monkeypatch.setattr(jax.random, "bernoulli", our_bernoulli)
    check(lambda *x: ours(*x, is_causal=True), lambda *x: theirs(*x, is_causal=True), parameters, X)


def test_dropout_follows_from_the_streams_of_the_layer() -> None:
    def outs() -> list[Any]:
        of = layer(
            dropout_rate=0.4,
            deterministic=False,
            broadcast_dropout=False,
            attention_fn=dot_product_attention,
        )
        return [of(X), of(X), of(X, deterministic=True)]

    (first, second, off), again = outs(), outs()
    jax.tree.map(np.testing.assert_array_equal, [first, second, off], again)
    assert abs(first - second).max() > 0.01
    assert abs(first - off).max() > 0.01


def test_weights_are_sown_before_dropout() -> None:
    options: Any = {"dropout_rate": 0.4, "deterministic": False, "broadcast_dropout": False}
    ours, theirs = layer(**options, attention_fn=dot_product_attention), layer(**options)
    sown = []
    for of in (ours, theirs):
        run = nnx.capture(nnx.Intermediate)(lambda of: of(X, is_causal=True, sow_weights=True))
        sown.append(run(of)[1]["attention_weights"].get_value())
    (found,), (want,) = sown
    np.testing.assert_allclose(found, want, rtol=0, atol=16 * 2.0**-24)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_decoding_with_a_cache(num_kv_heads: int) -> None:
    """One token at a time; each sees those before it, as in one causal call."""
    options: Any = {"num_kv_heads": num_kv_heads}
    ours = layer(**options, attention_fn=dot_product_attention)
    whole = layer(**options)(X, is_causal=True)
    ours.init_cache(X.shape)
    decode = nnx.jit(lambda of, token: of(token, decode=True))
    for step in range(X.shape[1]):
        np.testing.assert_allclose(
            decode(ours, X[:, step : step + 1])[:, 0],
            whole[:, step],
            rtol=0,
            atol=16 * 2.0**-24 * float(abs(whole).max()),
        )


@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (4, 1, 9), (7, 9)])
def test_a_bias_and_its_gradient(shape: tuple[int, ...]) -> None:
    check(dot_product_attention, nnx.dot_product_attention, *qkv(2, 7, 9, 4, 2, 8, 8), normal(*shape))


def test_the_cast_is_the_one_given() -> None:
    def to_bfloat16(arrays: Any, *, dtype: Any) -> Any:
        assert dtype is None
        return tuple(x.astype("bfloat16") for x in arrays)

    arrays = qkv(1, 5, 5, 2, 2, 8, 8)
    assert dot_product_attention(*arrays, promote_dtype=to_bfloat16).dtype == jnp.bfloat16


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no flag of dropout": (
        {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0), "broadcast_dropout": None},
        "broadcast_dropout: got None; expected True or False",
    ),
    "no key": ({"dropout_rate": 0.5, "broadcast_dropout": False}, "dropout_rng: got None; expected a JAX"),
    "all dropped": ({"dropout_rate": 1.0}, "dropout_rate: got 1.0; expected a number from 0 to below 1"),
    "causal": ({"is_causal": None}, "is_causal: got None"),
    "a bias as mask": ({"mask": jnp.array([[0.0, -1e9]])}, "mask: got a float mask with -1000000000.0"),
    "mask of other sizes": ({"mask": jnp.ones((1, 1, 3, 4))}, "mask: got shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        dot_product_attention(*qkv(1, 5, 5, 2, 2, 8, 8), **options)


@pytest.mark.found_outside
@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_shapes_are_refused_before_options(name: str) -> None:
    """Here every option is wrong, too."""
    arrays, message = wrong_shapes(name)
    with pytest.raises(ValueError, match=message):
        dot_product_attention(**arrays, dropout_rate=2.0, precision="exact")


def test_an_unknown_option_of_a_layer_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="input_positions"):
        layer(attention_fn=dot_product_attention)(X, input_positions=jnp.arange(9))
