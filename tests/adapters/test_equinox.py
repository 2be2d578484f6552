"""Our `MultiheadAttention` against Equinox's."""

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.kernels.adapters.equinox import MultiheadAttention, from_equinox
from attest.kernels.operations import attention
from tests.adapters.hostile import HOSTILE
from tests.adapters.roundings import check
from tests.kernels.kernel_cases import normal

X, KEYS = normal(9, 16), normal(12, 16)
BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
CAUSAL = jnp.tril(jnp.ones((9, 9), bool))
# name: options of the layer, its inputs, options of the call.
LAYERS: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "plain": ({}, (X, X, X), {}),
    "biases": (BIASES, (X, X, X), {"mask": CAUSAL}),
    "keys of another length": ({}, (X, KEYS, KEYS), {}),
    "other sizes": (
        {"key_size": 12, "value_size": 10, "output_size": 6, "qk_size": 8, "vo_size": 5},
        (X, normal(9, 12), normal(9, 10)),
        {"mask": CAUSAL},
    ),
    "a mask for each head": ({}, (X, X, X), {"mask": (normal(4, 9, 9) > 0) | jnp.eye(9, dtype=bool)[None]}),
    "floats of 0 and 1": ({}, (X, X, X), {"mask": CAUSAL.astype("float32")}),
    "dropout that is off": ({"dropout_p": 0.5}, (X, X, X), {"inference": True}),
    "inference": ({"dropout_p": 0.5, "inference": True}, (X, X, X), {}),
    "processed heads": (
        {},
        (X, X, X),
        {"process_heads": lambda query, key, value: (query * 2.0, key[::-1], value + 1.0)},
    ),
}


def layer(kind: Any, **options: Any) -> Any:
    return kind(4, 16, **options, key=jax.random.key(3))


def run(module: Any, *inputs: Any, **call: Any) -> Any:
    return module(*inputs, **call)


def test_the_signatures_are_those_of_equinox() -> None:
    theirs = eqx.nn.MultiheadAttention
    for ours, its in ((MultiheadAttention, theirs), (MultiheadAttention.__call__, theirs.__call__)):
        names = [
            [(x.name, x.kind, x.default) for x in inspect.signature(y).parameters.values()]
            for y in (ours, its)
        ]
        assert names[0] == names[1]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_that_of_equinox(name: str) -> None:
    options, inputs, call = LAYERS[name]
    theirs, static = eqx.partition(layer(eqx.nn.MultiheadAttention, **options), eqx.is_array)
    kind = from_equinox(static)

    def ours(arrays: Any, *inputs: Any) -> Any:
        return from_equinox(eqx.combine(arrays, static))(*inputs, **call)

    def library(arrays: Any, *inputs: Any) -> Any:
        return eqx.combine(arrays, static)(*inputs, **call)

    assert type(kind) is MultiheadAttention
    check(ours, library, theirs, *inputs)


def test_the_constructor_draws_the_parameters_of_equinox() -> None:
    ours, theirs = (layer(kind, **BIASES) for kind in (MultiheadAttention, eqx.nn.MultiheadAttention))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(ours), jax.tree.leaves(theirs))
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(ours)] == [
        jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(theirs)
    ]
    assert type(layer(MultiheadAttention)) is MultiheadAttention


def test_a_model_is_taken_over_with_its_parameters() -> None:
    class Other(eqx.nn.MultiheadAttention):
        pass

    model = {"first": layer(eqx.nn.MultiheadAttention), "second": [layer(Other)], "size": 3}
    found = from_equinox(model)
    assert type(found["first"]) is MultiheadAttention
    assert found["first"].query_proj.weight is model["first"].query_proj.weight
    assert found["second"] == model["second"]
    assert type(found["second"][0]) is Other
    assert found["size"] == 3


def test_saved_parameters_load(tmp_path: Any) -> None:
    theirs = layer(eqx.nn.MultiheadAttention)
    eqx.tree_serialise_leaves(tmp_path / "layer.eqx", theirs)
    ours = MultiheadAttention(4, 16, key=jax.random.key(9))
    ours = eqx.tree_deserialise_leaves(tmp_path / "layer.eqx", ours)
    np.testing.assert_array_equal(ours(X, X, X), from_equinox(theirs)(X, X, X))


def test_a_batch_goes_through_vmap() -> None:
    theirs = layer(eqx.nn.MultiheadAttention)

    def over_batch(module: Any) -> Any:
        return jax.vmap(lambda x: module(x, x, x, mask=CAUSAL))

    check(over_batch(from_equinox(theirs)), over_batch(theirs), normal(3, 9, 16))


def test_bfloat16() -> None:
    theirs = layer(eqx.nn.MultiheadAttention)
    half = jax.tree.map(lambda x: x.astype("bfloat16") if eqx.is_array(x) else x, theirs)
    x = X.astype("bfloat16")
    assert from_equinox(half)(x, x, x).dtype == jnp.bfloat16
    arrays, static = eqx.partition(half, eqx.is_array)
    check(
        lambda a, x: from_equinox(eqx.combine(a, static))(x, x, x, mask=CAUSAL).astype("float32"),
        lambda a, x: eqx.combine(a, static)(x, x, x, mask=CAUSAL),
        arrays,
        x,
        dtype="bfloat16",
    )


def test_dropout_drops_weights_of_each_head_by_the_key() -> None:
    ours, key = layer(MultiheadAttention, dropout_p=0.4), jax.random.key(5)
    heads: list[Any] = []

    def kept(*given: Any) -> Any:
        heads[:] = given
        return given

    found = ours(X, X, X, mask=CAUSAL, key=key, process_heads=kept)
    np.testing.assert_array_equal(found, ours(X, X, X, mask=CAUSAL, key=key))
    assert abs(found - ours(X, X, X, mask=CAUSAL, key=jax.random.key(6))).max() > 0.01
    assert abs(found - ours(X, X, X, mask=CAUSAL, inference=True)).max() > 0.01
    dropped = attention(*heads, attention_mask=CAUSAL, dropout_prob=0.4, dropout_rng=key, deterministic=False)
    want = jax.vmap(ours.output_proj)(dropped[0].reshape(9, 16))
    np.testing.assert_allclose(found, want, rtol=0, atol=16 * 2.0**-24 * float(abs(want).max()))


def test_the_old_name_of_inference_warns() -> None:
    ours = layer(MultiheadAttention, dropout_p=0.4)
    with pytest.warns(UserWarning, match="inference"):
        found = ours(X, X, X, deterministic=True)
    np.testing.assert_array_equal(found, ours(X, X, X, inference=True))


def test_inference_mode_of_equinox_switches_dropout_off() -> None:
    ours = layer(MultiheadAttention, dropout_p=0.4)
    np.testing.assert_array_equal(eqx.nn.inference_mode(ours)(X, X, X), ours(X, X, X, inference=True))


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "no key": ((X, X, X), {}, "key: got None; expected a JAX random key"),
    "an integer": ((X, X, X), {"key": 3}, "key: got a int; expected a JAX random key"),
    "a batch": ((X[None], X, X), {}, r"query: got shape \(1, 9, 16\); expected \[length, 16\]"),
    "lengths": ((X, X, KEYS), {"inference": True}, "value: got shape"),
    "a mask that broadcasts": (
        (X, X, X),
        {"inference": True, "mask": CAUSAL[:1]},
        r"mask: got shape \(1, 9\)",
    ),
    "a bias as mask": (
        (X, X, X),
        {"inference": True, "mask": jnp.full((9, 9), -1e9)},
        "mask: got a float mask with -1000000000.0",
    ),
    "heads of other shapes": (
        (X, X, X),
        {"inference": True, "process_heads": lambda q, k, v: (q, k, v[:, :2])},
        "process_heads: got heads of shapes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    inputs, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        layer(MultiheadAttention, dropout_p=0.4)(*inputs, **options)


def test_all_dropped_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^dropout_p: got 1\.0"):
        layer(MultiheadAttention, dropout_p=1.0)(X, X, X, key=jax.random.key(0))


@pytest.mark.found_outside
@pytest.mark.parametrize(
    "argument", ["query", "key_", "value", "mask", "key", "inference", "deterministic", "process_heads"]
)
def test_hostile_values_are_refused_by_the_name_of_the_argument(argument: str) -> None:
    module = layer(MultiheadAttention, dropout_p=0.5)
    arguments = {"query": X, "key_": X, "value": X, "key": jax.random.key(1)}
    for value in HOSTILE.values():
        with pytest.raises(ValueError, match=f"^{argument}: got "):
            module(**{**arguments, argument: value(arguments.get(argument))})
    if argument in ("query", "key_", "value"):
        with pytest.raises(ValueError, match=f"^{argument}: got a NoneType"):
            module(**{**arguments, argument: None})
