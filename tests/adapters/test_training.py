"""Models with our attention train like those with JAX's: as they are, tuned, and on eight devices."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import attest.kernels.configs.tunable
from attest.kernels.adapters import equinox, flax_nnx, jax_nn
from attest.kernels.operations import (
    FlashAttention,
    PersistentCache,
    Tuner,
    create_default_executor,
    functions,
)
from attest.kernels.operations.easydel import FlashAttn, OperationMetadata
from attest.kernels.operations.judging import Judgement, installed_judge
from tests.adapters.training import (
    BATCH,
    HEAD_DIM,
    HEADS,
    LENGTH,
    Loss,
    agree,
    losses,
    of_equinox,
    of_function,
    of_nnx,
)
from tests.kernels.kernel_cases import normal, qkv
from tests.kernels.meshes import mesh

DEVICES = 8
here = pytest.mark.process(devices=DEVICES)

type Model = Callable[..., tuple[Loss, Any]]


def of_operator(causal: bool = True, **options: Any) -> tuple[Loss, Any]:
    operator = FlashAttn(OperationMetadata(**options))
    return of_function(lambda *x: operator(*x, causal=causal).attention_outputs)


# name: the model with our attention, with JAX's, and with a defect: an adapter that drops the causal mask.
MODELS: dict[str, tuple[Model, Model, Model]] = {
    "Flax": (
        lambda **_: of_nnx(attention_fn=flax_nnx.dot_product_attention),
        of_nnx,  # without dropout Flax calls jax.nn.dot_product_attention
        lambda: of_nnx(
            attention_fn=lambda *x, is_causal, **options: flax_nnx.dot_product_attention(
                *x, **options, is_causal=False
            )
        ),
    ),
    "Equinox": (
        lambda **_: of_equinox(equinox.from_equinox),
        of_equinox,
        lambda: of_equinox(_blind),
    ),
    "EasyDeL": (
        of_operator,
        lambda: of_function(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True)),
        lambda: of_operator(causal=False),
    ),
}
ARRAYS = (jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, HEAD_DIM), "float32"),) * 3
ONE = (jax.ShapeDtypeStruct((LENGTH, HEADS, HEAD_DIM), "float32"),) * 3
# The calls that the models make: Equinox maps one sequence over the batch, and has a mask for causal order.
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Flax": (ARRAYS, {"causal": True}),
    "Equinox": (ONE, {"attention_mask": jnp.tril(jnp.ones((1, LENGTH, LENGTH), bool))}),
    "EasyDeL": (ARRAYS, {"causal": True}),
}


def _blind(model: Any) -> Any:
    """An Equinox model whose attention sees all tokens."""
    model = equinox.from_equinox(model)
    return eqx.tree_at(
        lambda x: x.attention, model, [lambda *x, mask, of=of: of(*x) for of in model.attention]
    )


@cache
def of_jax(name: str) -> np.ndarray:
    return losses(*MODELS[name][1]())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_with_the_attention_of_jax(name: str) -> None:
    agree(losses(*MODELS[name][0]()), of_jax(name))


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_that_drops_the_causal_mask_is_found(name: str) -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        agree(losses(*MODELS[name][2]()), of_jax(name))


@pytest.fixture(scope="module")
def tuned_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with a tuned configuration for each call of the models, not that of the tables."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTEST_CACHE_DIR", str(folder))
        patch.setattr(attest.kernels.configs.tunable, "MOST_CANDIDATES", 1)
        for name in ("Flax", "Equinox"):
            arrays, options = CALLS[name]
            executor = create_default_executor()
            executor.chooser.tuner = Tuner(1, 1, _all_but_the_first())
            executor.tune(FlashAttention(), *arrays, **options)
    return folder


def _all_but_the_first() -> Callable[..., Judgement]:
    """The judge that is installed, which finds the choice of the tables wrong."""
    installed, judged = installed_judge(), []
    assert installed is not None

    def judge(call: Any) -> Judgement:
        judged.append(call)
        return installed(call) if len(judged) > 1 else Judgement(False, "The tables' choice.")

    return judge


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_with_a_tuned_configuration(
    name: str, tuned_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    read = PersistentCache.get

    def recorded(cache: Any, *key: str, **options: Any) -> Any:
        found.append(read(cache, *key, **options))
        return found[-1]

    monkeypatch.setenv("ATTEST_CACHE_DIR", str(tuned_folder))
    monkeypatch.setattr(PersistentCache, "get", recorded)
    functions.default_executor.cache_clear()
    monkeypatch.setattr(FlashAttn, "executor", create_default_executor())
    agree(losses(*MODELS[name][0]()), of_jax(name))
    assert found
    assert all(x is not None and any(vars(x.config).values()) for x in found), found


@here
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_on_eight_devices(name: str) -> None:
    options: Any = {"mesh": mesh(), "batch_axis": "data", "head_axis": "model"}
    agree(losses(*MODELS[name][0](**options), mesh()), of_jax(name))


ATTENTION: dict[str, Callable[..., Any]] = {
    "jax.nn": lambda *x: jax_nn.dot_product_attention(*x, is_causal=True),
    "Flax": lambda *x: flax_nnx.dot_product_attention(*x, mask=jnp.tril(jnp.ones((12, 12)))),
}


@here
@pytest.mark.parametrize("name", ATTENTION)
def test_nothing_is_gathered_over_batch_and_heads(name: str) -> None:
    arrays = [
        jax.device_put(x, NamedSharding(mesh(), P("data", None, "model"))) for x in qkv(4, 12, 12, 4, 4, 8, 8)
    ]
    weights = jax.device_put(normal(4, 12, 4, 8), arrays[0].sharding)

    def loss(*arrays: Any) -> Any:
        return (ATTENTION[name](*arrays) * weights).sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile().as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
