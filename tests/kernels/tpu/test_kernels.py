"""The TPU kernels: right in the interpreter and under transforms, refusals by name, skipped blocks."""

from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from attest.kernels import xla
from attest.kernels.numerics.philox import dropout_words, keep_mask
from attest.kernels.pallas.tpu import BackwardSizes, BlockSizes, flash_attention, flash_attention_with_lse
from attest.kernels.pallas.tpu.blocks import choose
from tests.kernels.feature_cases import assert_close, expected, problem
from tests.kernels.interpreted import needs_tpu_interpreter
from tests.kernels.kernel_cases import normal, qkv

BLOCKS: dict[str, Any] = {
    "fwd_params": BlockSizes(16, 16),
    "bwd_params": BackwardSizes(BlockSizes(16, 24), BlockSizes(24, 16), BlockSizes(16, 16)),
}
X = jnp.ones((1, 8, 2, 16))


@pytest.fixture(autouse=True)
def nothing_that_must_not_be():
    yield
    from attest.kernels.pallas.interpreter import drain_violations

    assert [str(violation) for violation in drain_violations()] == []


def interpreted(function: Any, seed: int = 1) -> Any:
    """The function compiled, with its kernels and those of its derivatives interpreted."""
    from attest.kernels.pallas.interpreter import interpreted

    def run(*arguments: Any) -> Any:
        with interpreted(seed):
            return jax.jit(function)(*arguments)

    return run


# Every option is in one of them; the gate has far more.
AGREE = (
    "window pair, cap, head_dim 1",
    "bias, mask, sinks, one key head",
    "bias hides, cap, segments, sinks",
    "padded lengths, causal",
    "dropout, causal, negative scale, one key head",
    "dropout that all entries and heads share, origin",
    "a mask of keys, of heads; a bias of rows, cap, sinks",
    "a mask of rows, of heads; a bias of heads, cap",
    "ranges, sinks",
    "chunks of rows in any order, padded lengths",
)


@needs_tpu_interpreter
@pytest.mark.parametrize("name", AGREE)
def test_out_lse_and_gradients_are_those_of_the_clauses(name: str) -> None:
    options, arrays, floats, cotangents = problem(name)

    def run(arrays: Any, floats: Any) -> Any:
        call = lambda arrays, floats: flash_attention_with_lse(*arrays, **options, **floats, **BLOCKS)  # noqa: E731
        primal, vjp = jax.vjp(call, arrays, floats)
        return primal, vjp(cotangents)

    assert_close(interpreted(run)(arrays, floats), expected(name))


@needs_tpu_interpreter
def test_bfloat16_sums_in_float32() -> None:
    arrays: Any = qkv(dtype="bfloat16")
    got = interpreted(lambda *a: flash_attention(*a, causal=True, **BLOCKS))(*arrays)
    query, key, value = (x.astype(jnp.float32) for x in arrays)
    want = xla.flash_attention(query, key, value, causal=True)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-7, atol=2**-7)


@needs_tpu_interpreter
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 1.1e30}])
def test_finite_logits_of_any_size_keep_their_weights(options: dict[str, Any]) -> None:
    """One key has all the weight of a row: of its value is out, and of the row's cotangent its dvalue."""
    query, key, value = qkv(batch=1, q_length=20, k_length=40, q_heads=1, k_heads=1, dtype="bfloat16")
    d_out = normal(1, 20, 1, 16, dtype="bfloat16")

    def run(*arrays: Any) -> Any:
        call = lambda *arrays: flash_attention(*arrays, softmax_scale=3.7e11, **options, **BLOCKS)  # noqa: E731
        out, vjp = jax.vjp(call, *arrays)
        return out, vjp(d_out)

    out, (d_query, d_key, d_value) = interpreted(run)(query, key, value)
    winner = np.einsum("qd,kd->qk", *(np.asarray(x[0, :, 0], float) for x in (query, key))).argmax(axis=1)
    np.testing.assert_array_equal(out[0, :, 0], value[0, winner, 0])
    expected = np.zeros((40, 16))
    np.add.at(expected, winner, np.asarray(d_out[0, :, 0], float))
    np.testing.assert_allclose(np.asarray(d_value[0, :, 0], float), expected, rtol=2**-7)
    assert np.isfinite(np.asarray(d_query, float)).all()
    assert np.isfinite(np.asarray(d_key, float)).all()


@needs_tpu_interpreter
def test_poison_in_a_hidden_bias_stays_behind_the_cap() -> None:
    arrays, clean = qkv(batch=1), normal(1, 4, 40, 50)
    mask = np.arange(2000).reshape(1, 1, 40, 50) % 3 > 0

    def run(bias: Any) -> Any:
        options = {"attention_mask": mask, "logits_soft_cap": 2.0, **BLOCKS}
        out, vjp = jax.vjp(lambda *a: flash_attention(*a[:3], bias=a[3], **options), *arrays, bias)
        return out, vjp(out)

    got, want = (interpreted(run)(bias) for bias in (jnp.where(mask, clean, jnp.nan), clean))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def plain(query: Any, key: Any, value: Any, bias: Any) -> jax.Array:
    return flash_attention(query, key, value, causal=True, bias=bias, **BLOCKS)


def vmapped(call: Any) -> Any:
    return jax.vmap(lambda q, k, v, bias: call(q[None], k[None], v[None], bias)[0], (0, 0, 0, None))


def sharded(call: Any) -> Any:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P("data"), P("data"), P("data"), P())
    return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("data"))


WAYS: dict[str, Any] = {"jit": jax.jit, "remat": jax.checkpoint, "vmap": vmapped, "shard_map": sharded}


@needs_tpu_interpreter
@pytest.mark.parametrize("way", WAYS)
def test_every_transform_gives_the_same_answer(way: str) -> None:
    """A NaN in a value that some rows see: what shows it must be right under each of them."""
    arrays = qkv(q_length=20, k_length=25, q_heads=2, k_heads=1)
    bias, cotangent = normal(1, 2, 1, 25), normal(2, 20, 2, 16, seed=5)
    arrays = (*arrays[:2], arrays[2].at[1, 20, 0, 3].set(jnp.nan))

    def gradients(call: Any) -> Any:
        out, vjp = jax.vjp(call, *arrays, bias)
        return out, *vjp(cotangent)

    got = interpreted(lambda: gradients(WAYS[way](plain)))()
    reference = lambda *a: xla.flash_attention(*a[:3], causal=True, bias=a[3])  # noqa: E731
    for a, b in zip(got, gradients(reference), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert jnp.isnan(got[0]).sum() == 2 * 5  # two query heads, the rows that see key 20


@needs_tpu_interpreter
def test_the_order_of_a_grid_changes_no_bit() -> None:
    arrays = qkv(batch=1)

    def run(*arrays: Any) -> Any:
        out, vjp = jax.vjp(lambda *a: flash_attention(*a, sliding_window=(9, 4), **BLOCKS), *arrays)
        return out, *vjp(out)

    first, second = (interpreted(run, seed)(*arrays) for seed in (3, 4))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@needs_tpu_interpreter
def test_dropout_keeps_what_the_generator_says() -> None:
    """With logits of 0 and the unit matrix for a value, out is the weights themselves."""
    batch, rows, keys, heads, probability = 2, 20, 40, 2, 0.3
    seed = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
    zeros = jnp.zeros((batch, keys, heads, 8))
    value = jnp.broadcast_to(jnp.eye(keys)[:, None], (batch, keys, heads, keys))

    def run() -> jax.Array:
        options: dict[str, Any] = {"dropout_prob": probability, "dropout_seed": seed}
        return flash_attention(zeros[:, :rows], zeros, value, **options, **BLOCKS)

    weights = interpreted(run)()
    for b in range(batch):
        entry, every_head, every_row = jnp.int32(b), jnp.arange(heads), jnp.arange(rows)
        keep = keep_mask(
            dropout_words(jnp.asarray(seed), None, ""), probability, entry, every_head, every_row, 0, keys, ""
        )
        want = jnp.where(keep, 1 / (1 - probability) / keys, 0).transpose(1, 0, 2)
        np.testing.assert_allclose(weights[b], want, rtol=1e-6)


@needs_tpu_interpreter
def test_hidden_blocks_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 x 4 blocks of equal lengths, causal order shows the ten on the diagonal and below."""
    from attest.kernels.pallas.interpreter import stock

    copied: list[tuple[int, ...]] = []
    plain_get = stock.get

    @wraps(plain_get)
    def get(*arguments: Any, **details: Any) -> Any:
        if "input_name" in details:
            copied.append(tuple(int(i) for i in arguments[6]))
        return plain_get(*arguments, **details)

    monkeypatch.setattr(stock, "get", get)
    x = normal(1, 64, 1, 8)
    options: dict[str, Any] = {"fwd_params": BlockSizes(16, 16)}

    def copies(**more: Any) -> int:
        copied.clear()
        interpreted(lambda x: flash_attention(x, x, x, **options, **more))(x)
        return len(copied)

    # Blocks of queries, with their rows if there are any, and for each of them blocks of keys and of values;
    # a block that two steps in a row ask for is copied once.
    assert copies() == 4 + 2 * 16
    assert copies(causal=True) <= 4 + 4 + 2 * 10
    assert copies(causal=True, sliding_window=(15, 0)) <= 4 + 4 + 2 * 7


def grids(function: Any, *arrays: Any) -> list[tuple[int, ...]]:
    """The grids of the kernels that a function launches."""
    found: list[tuple[int, ...]] = []

    def search(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                found.append(tuple(eqn.params["grid_mapping"].grid))
                continue
            for inner in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    search(getattr(inner, "jaxpr", inner))

    search(jax.make_jaxpr(function)(*arrays).jaxpr)
    return found


def test_a_window_shortens_the_grid() -> None:
    x = jnp.ones((1, 4096, 2, 64), jnp.bfloat16)
    (whole,) = grids(lambda x: flash_attention(x, x, x), x)
    # The second one would mark what values that are not finite make NaN.
    windowed, propagating = grids(lambda x: flash_attention(x, x, x, causal=True, sliding_window=(500, 0)), x)
    assert whole == (1, 2, 8, 8)
    assert windowed == propagating == (1, 2, 8, 2)


def test_it_is_exported_for_a_tpu_where_there_is_none() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return flash_attention(x, x, x, causal=True, dropout_prob=0.1, dropout_seed=3).sum()

    exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=["tpu"])(X)
    names = ("flash_forward", "flash_backward_query", "flash_backward_key")
    assert all(name in exported.mlir_module() for name in names)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad])
def test_without_a_tpu_one_sentence_says_what_to_do(wrap: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"expected tpu\. Use attest\.kernels\.xla"):
        wrap(lambda x: flash_attention(x, x, x).sum())(X)


HALF, WIDE = jnp.ones((1, 8, 2, 16), jnp.float16), jnp.ones((1, 8, 2, 257))
UNSUPPORTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "float16": (HALF, {}, "takes float32 and bfloat16, and the call has float16"),
    "float16 bias": (
        X,
        {"bias": jnp.ones((1, 1, 1, 8), jnp.float16)},
        "takes a bias and logits of float32 and bfloat16",
    ),
    "float16 logits": (X, {"logits_dtype": "float16"}, "takes a bias and logits of float32 and bfloat16"),
    "head_dim": (WIDE, {}, "takes head dims up to 256, and the call has 257"),
    "small blocks": (X, {"fwd_params": BlockSizes(16, 16)}, r"BlockSizes\(q=16, k=16\) is not supported"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name_when_traced(name: str) -> None:
    x, options, message = UNSUPPORTED[name]
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(lambda x: flash_attention(x, x, x, **options), x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fwd_params": (16, 16)}, "fwd_params: got a tuple; expected BlockSizes"),
        ({"fwd_params": BackwardSizes()}, "fwd_params: got a BackwardSizes; expected BlockSizes"),
        ({"bwd_params": 16}, "bwd_params: got a int; expected BlockSizes or BackwardSizes"),
        ({"precision": "high"}, "precision: got 'high'; expected one of None"),
        ({"precision": ["highest"]}, "precision: got"),
    ],
)
def test_a_wrong_parameter_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(X, X, X, **options)


@pytest.mark.parametrize("size", [0, -16, 12, 16.0, "16"])
def test_a_wrong_block_size_is_named(size: Any) -> None:
    with pytest.raises(ValueError, match=r"BlockSizes\.k: got"):
        BlockSizes(16, size)


@pytest.mark.parametrize("kernel", ["forward", "backward_query", "backward_key", "backward_bias"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_table_has_blocks_that_a_tpu_takes(kernel: str, itemsize: int) -> None:
    for head_dim in (1, 64, 256):
        for length in (1, 200, 1 << 17):
            sizes = choose(kernel, head_dim, itemsize, length, length)
            assert sizes.q % 128 == sizes.k % 128 == 0
            assert max(sizes.q, sizes.k) < length + 128


def test_the_table_says_what_it_lacks() -> None:
    with pytest.raises(LookupError, match=r"blocks.toml has no row for forward, head_dim 300, 2 bytes"):
        choose("forward", 300, 2, 1, 1)


@pytest.mark.parametrize(
    ("precision", "expected"), [(None, "HIGHEST"), ("highest", "HIGHEST"), ("default", "DEFAULT")]
)
def test_precision_is_that_of_float32_products_alone(precision: Any, expected: str) -> None:
    def trace(dtype: str) -> str:
        x = X.astype(dtype)
        return str(jax.make_jaxpr(lambda x: flash_attention(x, x, x, precision=precision))(x))

    assert f"Precision.{expected}" in trace("float32") or expected == "DEFAULT"
    assert "Precision.HIGHEST" not in trace("bfloat16")
    assert ("Precision.HIGHEST" in trace("float32")) == (expected == "HIGHEST")
