"""Programs that `jax.export` makes for every batch and length: they are right, or refused by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attest import flash_attention
from attest.kernels import triton
from attest.kernels.choice.choose import Device, Traits, implementation_for
from attest.kernels.pallas import mosaic_gpu, tpu
from attest.kernels.xla import flash_attention_with_lse
from tests.kernels.interpreted import needs_compiler

pytestmark = needs_compiler

BATCH, ROWS, KEYS = export.symbolic_shape("b, q, k")
# Batch, rows and keys: one entry and less than a tile; more than one of each.
SIZES = [(1, 1, 9), (2, 300, 257)]

# name: the shapes of the arrays that are options, by name, and the other options.
OPTIONS: dict[str, tuple[dict[str, tuple[Any, ...]], dict[str, Any]]] = {
    "causal": ({}, {"causal": True}),
    "window, cap": ({}, {"sliding_window": (5, 2**33), "logits_soft_cap": 2.0}),
    "mask, bias": ({"attention_mask": ("b", 1, "q", "k"), "bias": (1, 4, "q", "k")}, {}),
    "bias of every row": ({"bias": ("b", 1, 1, "k")}, {"causal": True}),
    "sinks, not normalised": ({"softmax_aux": (4, 1)}, {"normalize_output": False}),
    "segments": ({"q_segment_ids": ("b", "q"), "kv_segment_ids": ("b", "k")}, {}),
    "lengths": ({"cum_seqlens_q": ("n",), "cum_seqlens_k": ("n",)}, {"causal": True}),
    "positions": ({"q_offset": ("b",), "kv_positions": (1, "k")}, {"causal": True}),
    "dropout that all entries share": ({}, {"dropout_prob": 0.3, "dropout_seed": 4, "dropout_shared": "b"}),
    "dropout that all heads share": ({}, {"dropout_prob": 0.3, "dropout_seed": 4, "dropout_shared": "h"}),
    "ALiBi": ({"alibi_slopes": ("b", 4), "q_offset": ("b",)}, {}),
}
TENSORS = {"query": ("b", "q", 4, 8), "key": ("b", "k", 2, 8), "value": ("b", "k", 2, 4)}
FLOATS = (*TENSORS, "bias", "softmax_aux")


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(len(name))
    if name == "attention_mask":
        return rng.random(shape) < 0.7
    if name.startswith("cum_seqlens"):
        return np.arange(shape[0], dtype=np.int32)  # Sequences of one token.
    if name in (*FLOATS, "alibi_slopes"):
        return rng.standard_normal(shape).astype(np.float32)
    return rng.integers(0, 2, shape).astype(np.int32)


def of_sizes(name: str, batch: Any, rows: Any, keys: Any) -> dict[str, tuple[Any, ...]]:
    sizes = {"b": batch, "q": rows, "k": keys, "n": batch + 1}
    return {key: tuple(sizes.get(x, x) for x in shape) for key, shape in (TENSORS | OPTIONS[name][0]).items()}


def both_passes(name: str) -> Any:
    def run(arrays: dict[str, Any]) -> Any:
        floats = {key: x for key, x in arrays.items() if key in FLOATS}
        others = {key: x for key, x in arrays.items() if key not in FLOATS}
        (out, lse), pull = jax.vjp(
            lambda floats: flash_attention_with_lse(**floats, **others, **OPTIONS[name][1]), floats
        )
        return out, lse, pull((jnp.sin(out), jnp.where(lse == -jnp.inf, 0.0, jnp.cos(lse))))

    return jax.jit(run)


@pytest.mark.parametrize("name", OPTIONS)
def test_one_program_is_right_for_every_batch_and_length(name: str) -> None:
    run = both_passes(name)
    symbolic = {
        key: jax.ShapeDtypeStruct(shape, array(key, tuple(1 for _ in shape)).dtype)
        for key, shape in of_sizes(name, BATCH, ROWS, KEYS).items()
    }
    program = export.export(run)(symbolic)
    for sizes in SIZES:
        arrays = {key: array(key, shape) for key, shape in of_sizes(name, *sizes).items()}
        for got, want in zip(
            jax.tree.leaves(program.call(arrays)), jax.tree.leaves(run(arrays)), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "shape", [(BATCH, 7, 2, 8), (2, ROWS, 2, 8), (BATCH, 3, ROWS, 2, 8), (ROWS, 2, 8)], ids=str
)
def test_any_of_them_may_be_symbolic(shape: tuple[Any, ...]) -> None:
    program = export.export(jax.jit(lambda x: flash_attention(x, x, x, causal=True)))(
        jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    x = array("query", tuple(size if isinstance(size, int) else 5 for size in shape))
    np.testing.assert_allclose(program.call(x), flash_attention(x, x, x, causal=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("query", (2, 8, KEYS, 4)),
        ("key", (2, 8, 4, KEYS)),
        ("value", (2, 8, KEYS, 4)),
        ("softmax_aux", (4, KEYS)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_numbers_of_heads_channels_and_sinks_may_not(name: str, shape: tuple[Any, ...]) -> None:
    arrays = {key: jax.ShapeDtypeStruct((2, 8, 4, 4), jnp.float32) for key in TENSORS}
    arrays[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    words = rf"^{name}: got shape \(.*k.*\); expected integers as its last 2 sizes\. Batch and lengths alone"
    with pytest.raises(ValueError, match=words):
        export.export(jax.jit(lambda arrays: flash_attention(**arrays)))(arrays)


@pytest.mark.parametrize("module", [triton, tpu, mosaic_gpu], ids=["triton", "pallas_tpu", "mosaic_gpu"])
def test_other_implementations_refuse_them_by_name(module: Any) -> None:
    x = jax.ShapeDtypeStruct((2, ROWS, 2, 64), jnp.bfloat16)
    with pytest.raises(
        NotImplementedError, match=r"^[a-z_]+: takes no symbolic sizes\. Use platform='xla', or leave it out"
    ):
        export.export(jax.jit(lambda x: module.flash_attention(x, x, x)))(x)


@pytest.mark.parametrize("device", [Device("gpu", "9.0"), Device("tpu")], ids=["gpu", "tpu"])
def test_xla_is_chosen_for_them(device: Device) -> None:
    call = Traits(frozenset({"bfloat16"}), head_dims=frozenset({64}), symbolic=True)
    # JAX's version is one for which all are chosen.
    chosen = implementation_for(device, call, installed=bool, jax_version=(0, 11, 2))
    assert chosen.name == "xla"
    with pytest.raises(NotImplementedError, match="takes no symbolic sizes"):
        implementation_for(
            device,
            call,
            "triton" if device.backend == "gpu" else "pallas_tpu",
            installed=bool,
            jax_version=(0, 11, 2),
        )


def test_a_program_for_several_platforms() -> None:
    """The choice is the same everywhere, so it is not refused anywhere."""
    x = jax.ShapeDtypeStruct((BATCH, ROWS, 2, 64), jnp.float32)
    run = jax.jit(lambda x: flash_attention(x, x, x))
    program = export.export(run, platforms=["cpu", "cuda", "tpu"])(x)
    ones = jnp.ones((2, 3, 2, 64))
    np.testing.assert_allclose(program.call(ones), run(ones), rtol=1e-6)
