"""Our `attention_fn` in Flax's linen layers, against Flax's own."""

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import attest
from attest.kernels import operations, xla
from attest.kernels.adapters.flax_linen import dot_product_attention
from attest.kernels.ring import ring_attention
from tests.adapters.roundings import check, our_bernoulli
from tests.adapters.wrong_shapes import WRONG_SHAPES, wrong_shapes
from tests.kernels.kernel_cases import normal, qkv

X = normal(2, 9, 16)
KEYS = normal(2, 12, 16)
CAUSAL = nn.make_causal_mask(jnp.ones((2, 9)))  # floats of 0 and 1
TOKENS = (np.arange(9) < np.array([[9], [6]])).astype("float32")
# The first key is a token, which every query sees: Flax has the mean of all values where none is seen.
PADDED = nn.combine_masks(CAUSAL, nn.make_attention_mask(jnp.ones((2, 9)), TOKENS))
# name: options of the layer, inputs, options of the call.
LAYERS: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "plain": ({}, (X,), {}),
    "causal": ({}, (X,), {"mask": CAUSAL}),
    "causal and padding": ({}, (X,), {"mask": PADDED}),
    "a bool mask of keys": ({}, (X,), {"mask": (jnp.arange(9) < 5)[None, None, None]}),
    "keys of another length": ({}, (X, KEYS), {}),
    "normalised queries and keys": ({"normalize_qk": True}, (X,), {"mask": CAUSAL}),
    "no batch": ({}, (X[0],), {"mask": CAUSAL[0]}),
    "two batch dimensions": ({}, (normal(2, 3, 9, 16),), {"mask": CAUSAL[:, None]}),
    "softmax in float32": ({"force_fp32_for_softmax": True}, (X,), {}),
    "precision": ({"precision": "highest"}, (X,), {}),
    "dropout that is off": ({"dropout_rate": 0.5, "deterministic": True}, (X,), {}),
}


def layer(**options: Any) -> Any:
    return nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=32, **options)


def parameters(of: Any, *inputs: Any) -> Any:
    variables = of.init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, *inputs)
    # Biases are zeros at first: their own gradients are the same, but no other.
    return {
        **variables,
        "params": jax.tree.map(lambda x: x + 0.1 * normal(*x.shape), variables["params"]),
    }


def both(options: dict[str, Any]) -> tuple[Any, Any]:
    return layer(**options, attention_fn=dot_product_attention), layer(**options)


def test_the_signature_is_that_of_flax() -> None:
    """Flax leaves out what a function has no parameter for, without a word."""
    ours, theirs = (
        [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]
        for function in (dot_product_attention, nn.dot_product_attention)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_that_of_flax(name: str) -> None:
    options, inputs, call = LAYERS[name]
    ours, theirs = both(options)
    check(
        lambda *x: ours.apply(*x, **call),
        lambda *x: theirs.apply(*x, **call),
        parameters(theirs, *inputs),
        *inputs,
    )


def test_the_causal_mask_matters() -> None:
    """So that the test above cannot pass because masks have no effect on these inputs."""
    ours, _ = both({})
    variables = parameters(ours, X)
    assert abs(ours.apply(variables, X) - ours.apply(variables, X, mask=CAUSAL)).max() > 0.01


def test_a_layer_in_bfloat16() -> None:
    ours, _ = both({"dtype": jnp.bfloat16})
    theirs = layer(dtype=jnp.float64)
    variables = parameters(layer(), X)
    assert ours.apply(variables, X).dtype == jnp.bfloat16
    check(
        lambda *x: ours.apply(*x, mask=CAUSAL).astype("float32"),
        lambda *x: theirs.apply(*x, mask=CAUSAL),
        variables,
        X,
        dtype="bfloat16",
    )


@pytest.mark.found_outside
@pytest.mark.parametrize("options", [{}, {"broadcast_dropout": True}, {"broadcast_dropout": False}], ids=str)
def test_dropout_is_that_of_flax_with_our_choice_of_weights(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Flax shares one mask by default; one of ours of a single batch entry and head is what it then draws."""
    ours, theirs = both({"dropout_rate": 0.4, "deterministic": False, **options})
    monkeypatch.setattr(jax.random, "bernoulli", our_bernoulli)
    rng = jax.random.key(7)
    check(
        lambda *x: ours.apply(*x, mask=CAUSAL, dropout_rng=rng),
        lambda *x: theirs.apply(*x, mask=CAUSAL, dropout_rng=rng),
        parameters(theirs, X),
        X,
    )


def test_dropout_follows_from_the_key() -> None:
    ours, _ = both({"dropout_rate": 0.4, "broadcast_dropout": False})
    variables = parameters(layer(), X)

    def run(seed: int, **options: Any) -> Any:
        rngs = {"dropout": jax.random.key(seed)}
        return ours.apply(variables, X, rngs=rngs, **{"deterministic": False, **options})

    np.testing.assert_array_equal(run(0), run(0))
    np.testing.assert_allclose(run(0), jax.jit(run, static_argnums=0)(0), rtol=0, atol=16 * 2.0**-24)
    assert abs(run(0) - run(1)).max() > 0.01
    np.testing.assert_array_equal(run(0, deterministic=True), run(1, deterministic=True))


def test_an_old_key_is_the_new_one() -> None:
    options: Any = {"dropout_rate": 0.4, "broadcast_dropout": False}
    arrays = qkv(2, 5, 5, 2, 2, 8, 8)
    old, new = (
        dot_product_attention(*arrays, dropout_rng=key, **options)
        for key in (jax.random.PRNGKey(3), jax.random.key(3))
    )
    np.testing.assert_array_equal(old, new)


def test_weights_are_sown_before_dropout() -> None:
    ours, theirs = both({"dropout_rate": 0.4, "deterministic": False, "broadcast_dropout": False})
    variables = parameters(theirs, X)

    def run(of: Any) -> Any:
        options: Any = {"mask": CAUSAL, "dropout_rng": jax.random.key(0)}
        out, state = of.apply(variables, X, sow_weights=True, mutable=["intermediates"], **options)
        np.testing.assert_array_equal(out, of.apply(variables, X, **options))
        return state["intermediates"]

    found, want = run(ours), run(theirs)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=16 * 2.0**-24), found, want)


def test_decoding_with_a_cache() -> None:
    ours, theirs = both({"decode": True})
    variables = theirs.init(jax.random.key(0), X)
    caches = [variables["cache"]] * 2
    for step in range(4):
        token = X[:, step : step + 1]
        outs = []
        for number, of in enumerate((ours, theirs)):
            state = {"params": variables["params"], "cache": caches[number]}
            out, changed = of.apply(state, token, mutable=["cache"])
            caches[number] = changed["cache"]
            outs.append(out)
        np.testing.assert_allclose(*outs, rtol=0, atol=16 * 2.0**-24 * abs(outs[1]).max())


@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (4, 1, 9), (7, 9), (9,)])
def test_a_bias_and_its_gradient(shape: tuple[int, ...]) -> None:
    check(dot_product_attention, nn.dot_product_attention, *qkv(2, 7, 9, 4, 4, 8, 8), normal(*shape))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
def test_dtypes_are_those_of_flax(dtype: Any) -> None:
    query, key, value = qkv(1, 5, 5, 2, 2, 8, 8)
    arrays = (query.astype("bfloat16"), key, np.asarray(value, np.float64))
    found = dot_product_attention(*arrays, dtype=dtype)
    assert found.dtype == nn.dot_product_attention(*arrays, dtype=dtype).dtype


def test_float64_is_refused_with_advice() -> None:
    with jax.enable_x64(True):
        arrays = [jnp.ones((1, 3, 2, 8), jnp.float64)] * 3
        with pytest.raises(ValueError, match=r"^dtype: got float64; .* Pass dtype=jnp.float32"):
            dot_product_attention(*arrays)
        assert dot_product_attention(*arrays, dtype=jnp.float32).dtype == jnp.float32


def test_a_query_that_sees_no_key_is_zero() -> None:
    arrays = qkv(1, 5, 5, 2, 2, 8, 8)
    mask = jnp.ones((5, 5), bool).at[2].set(False)
    assert not dot_product_attention(*arrays, mask=mask)[:, 2].any()
    assert nn.dot_product_attention(*arrays, mask=mask)[:, 2].any()


def some(*_: Any) -> Any:
    return None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no flag of dropout": (
        {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0), "broadcast_dropout": None},
        "broadcast_dropout: got None; expected True or False",
    ),
    "no flag of softmax": ({"force_fp32_for_softmax": 1}, "force_fp32_for_softmax: got 1"),
    "no key": ({"dropout_rate": 0.5, "broadcast_dropout": False}, "dropout_rng: got None; expected a JAX"),
    "an integer": (
        {"dropout_rate": 0.5, "broadcast_dropout": False, "dropout_rng": 3},
        "dropout_rng: got a int; expected a JAX random key",
    ),
    "all dropped": ({"dropout_rate": 1.0}, "dropout_rate: got 1.0"),
    "no flag": ({"dropout_rate": 0.5, "deterministic": None}, "deterministic: got None"),
    "dot_general": ({"einsum_dot_general": some}, "einsum_dot_general: got .* expected None"),
    "einsum": ({"qk_attn_weights_einsum": some}, "qk_attn_weights_einsum: got .* expected None"),
    "the other einsum": ({"attn_weights_value_einsum": some}, "attn_weights_value_einsum: got"),
    "precision": ({"precision": "exact"}, "precision: got 'exact'"),
    "a bias as mask": ({"mask": jnp.array([[0.0, -1e9]])}, "mask: got a float mask with -1000000000.0"),
    "mask of other sizes": ({"mask": jnp.ones((1, 1, 3, 4))}, "mask: got shape"),
    "too many axes": ({"mask": jnp.ones((1, 1, 1, 5, 5))}, "mask: got shape .* at most 4 axes"),
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
        dot_product_attention(**arrays, dropout_rate=2.0, einsum_dot_general=some, precision="exact")


@pytest.mark.found_outside
@pytest.mark.parametrize("forced", [False, True])
def test_weights_are_sown_in_the_dtype_of_flax(forced: bool) -> None:
    sown: list[Any] = []
    for of in both({"dtype": jnp.bfloat16, "force_fp32_for_softmax": forced}):
        _, state = of.apply(parameters(layer(), X), X, sow_weights=True, mutable=["intermediates"])
        sown += jax.tree.leaves(state["intermediates"])
    found, want = sown
    assert found.dtype == want.dtype == (jnp.float32 if forced else jnp.bfloat16)
    np.testing.assert_allclose(found.astype("f"), want.astype("f"), rtol=0, atol=2.0**-8)


DROPS: dict[str, Any] = {"dropout_rate": 0.5, "deterministic": False}
LOST: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a mask": ({}, {"mask": CAUSAL}, "mask"),
    "dropout": (DROPS, {"dropout_rng": jax.random.key(0)}, "dropout_rng"),
    "dropout of a stream": (DROPS, {"rngs": {"dropout": jax.random.key(0)}}, "dropout_rng"),
}
FUNCTIONS: dict[str, Any] = {
    "attest": attest.flash_attention,
    "xla": partial(xla.flash_attention, causal=True),
    "operations": operations.flash_attention,
    "ring": ring_attention,
}


@pytest.mark.found_outside
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", LOST)
def test_what_a_layer_would_lose_on_its_way_to_our_functions_is_refused(name: str, function: str) -> None:
    """A layer drops in silence what its attention_fn has no parameter for: so ours have some to refuse."""
    options, call, argument = LOST[name]
    of = layer(**options, attention_fn=FUNCTIONS[function])
    message = rf"^{argument}: got a .*; expected None\. .*attest\.kernels\.adapters\.flax_linen"
    with pytest.raises(ValueError, match=message):
        of.apply(parameters(layer(), X), X, **call)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_layer_that_loses_nothing_may_have_our_functions(function: str) -> None:
    variables = parameters(layer(), X)
    found = layer(attention_fn=FUNCTIONS[function]).apply(variables, X)
    mask = CAUSAL if function == "xla" else None
    np.testing.assert_allclose(found, layer().apply(variables, X, mask=mask), rtol=0, atol=1e-5)
