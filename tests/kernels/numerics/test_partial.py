"""Unrounded results on parts of the keys: float32, and merged to what the call on all keys gives."""

import os
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from attest.kernels.call.call import Call, check_call
from attest.kernels.contract import Backward, Forward, Passes, Settings
from attest.kernels.differentiate import attend
from attest.kernels.implementations import IMPLEMENTATIONS
from attest.kernels.numerics.partial import Partial, merge_parts, merge_sums
from attest.kernels.numerics.row_terms import RowTerms, row_terms
from attest.kernels.pallas import tpu
from attest.kernels.visibility.intervals import hides_pairs
from tests.kernels.implementations import TRITON, WHOLE, XLA
from tests.kernels.interpreted import needs_interpreter, needs_tpu_interpreter
from tests.kernels.mosaic_gpu.test_kernels import needs_hopper

IN_PALLAS = "PJRT_NPROC" in os.environ
BATCH, Q, K, K_HEADS, GROUP, DIM, VALUE_DIM = 1, 20, 32, 1, 2, 16, 8
HEADS = K_HEADS * GROUP
# Two roundings of a float32 sum of terms below 4, with some to spare. A rounding to bfloat16 is 2**-9.
TOLERANCE: dict[str, Any] = {"rtol": 2e-6, "atol": 4e-6}
RNG = np.random.default_rng(7)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.bfloat16)


def small(*shape: int) -> jax.Array:
    """-1, 0 and 1: with a scale of log(2), weights are powers of two.

    Rounding weights to bfloat16, as kernels do before they multiply values, then changes none. So parts
    differ from the whole by the order of float32 sums alone, whatever their references are.
    """
    return jnp.asarray(RNG.integers(-1, 2, shape), jnp.bfloat16)


QUERY, KEY = small(BATCH, Q, HEADS, DIM), small(BATCH, K, K_HEADS, DIM)
VALUE, D_OUT = normal(BATCH, K, K_HEADS, VALUE_DIM), normal(BATCH, Q, HEADS, VALUE_DIM)
BIAS = small(1, HEADS, Q, K) * jnp.bfloat16(0.5)
SCALE = float(np.log(2))
# Two parts of one length, so that one program runs both.
PARTS = slice(0, 16), slice(16, K)
# Rows 0 to 3 see no key of the second part, row 19 none of any.
SEGMENTS: dict[str, Any] = {
    "q_segment_ids": np.array([[0] * 4 + [1] * 15 + [5]], np.int32),
    "kv_segment_ids": np.array([[0] * 8 + [1] * 24], np.int32),
}
DROPOUT: dict[str, Any] = {"dropout_prob": 0.25, "dropout_seed": 3, "causal": True}


TPU_BLOCKS = {"fwd_params": tpu.BlockSizes(24, 16), "bwd_params": tpu.BlockSizes(24, 16)}
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "xla": ("xla", XLA.blocks),
    "xla in one piece": ("xla", WHOLE.blocks),
    "triton": ("triton", TRITON.blocks),
    "pallas tpu": ("pallas_tpu", TPU_BLOCKS),
    "hopper": ("mosaic_gpu", {}),
}
PLACES = {"triton": needs_interpreter, "pallas tpu": needs_tpu_interpreter, "hopper": needs_hopper}
kernels = pytest.mark.parametrize(
    "name", [pytest.param(x, marks=PLACES[x]) if x in PLACES else x for x in KERNELS]
)


def prepared(name: str, **more: Any) -> tuple[Passes, Settings]:
    """The passes of a kernel, and its settings with blocks that cut the lengths."""
    platform, blocks = KERNELS[name]
    passes = next(x for x in IMPLEMENTATIONS if x.name == platform).load()
    settings = Settings(
        passes.check_forward(blocks.get("fwd_params")),
        passes.check_backward(blocks.get("bwd_params")),
        normalize_output=True,
        precision=passes.check_precision(None),
        logits_dtype="float32",
        unrounded=True,
    )
    return passes, replace(settings, **more)


def interpreting() -> Any:
    if not IN_PALLAS:
        return nullcontext()
    from attest.kernels.pallas.interpreter import interpreted

    return interpreted(1)


@pytest.fixture(autouse=True)
def no_violations_of_tpu_kernels() -> Generator[None]:
    yield
    if IN_PALLAS:
        from attest.kernels.pallas.interpreter import drain_violations

        assert [str(violation) for violation in drain_violations()] == []


@lru_cache
def _jitted_forward(passes: Passes, settings: Settings) -> Callable[[Call], Forward]:
    return jax.jit(partial(passes.forward, settings))


def forward(passes: Passes, settings: Settings, call: Call) -> Forward:
    with interpreting():
        return _jitted_forward(passes, settings)(call)


@lru_cache
def _jitted_backward(passes: Passes, settings: Settings) -> Callable[..., Backward]:
    # A `RowTerms` is no pytree, so its fields are the arguments.
    def run(call: Call, terms: dict[str, Any], kept: Any) -> Backward:
        return passes.backward(settings, call, RowTerms(**terms), kept)

    return jax.jit(run)


def backward(passes: Passes, settings: Settings, call: Call, terms: RowTerms, kept: Any) -> Backward:
    with interpreting():
        return _jitted_backward(passes, settings)(call, vars(terms), kept)


def whole(**options: Any) -> Call:
    return check_call(QUERY, KEY, VALUE, softmax_scale=SCALE, **options)


def sliced(keys: slice, **options: Any) -> Call:
    """The call on some neighbouring keys, which stand where they do in the whole."""
    if "kv_segment_ids" in options:
        options["kv_segment_ids"] = options["kv_segment_ids"][:, keys]
    if "bias" in options:
        options["bias"] = options["bias"][..., keys]
    place = {"q_offset": K - Q - keys.start, "origin": (0, 0, 0, keys.start)}
    return check_call(QUERY, KEY[:, keys], VALUE[:, keys], softmax_scale=SCALE, **options, **place)


def positioned(chosen: np.ndarray, query: Any, key: Any, value: Any, **options: Any) -> Call:
    """The call on any keys, by their positions."""
    positions = chosen[None].astype(np.int32)
    arrays = query, key[:, chosen], value[:, chosen]
    return check_call(*arrays, kv_positions=positions, q_offset=K - Q, **options)


def merged(parts: list[Forward]) -> tuple[jax.Array, jax.Array]:
    return merge_parts(jnp.stack([x.out for x in parts]), jnp.stack([x.lse for x in parts]))


def rounded(x: Forward) -> Forward:
    return x._replace(out=x.out.astype(jnp.bfloat16).astype(jnp.float32))


def assert_merges(parts: list[Forward], full: Forward) -> None:
    """The parts merge to the whole, and would not if one of them were rounded to bfloat16."""
    assert {x.dtype for part in [*parts, full] for x in part[:3]} == {np.dtype(np.float32)}
    out, lse = merged(parts)
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose(out, full.out, **TOLERANCE)
    np.testing.assert_allclose(lse, full.lse, **TOLERANCE)
    out, _ = merged([rounded(parts[0]), *parts[1:]])
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(out, full.out, **TOLERANCE)


@kernels
@pytest.mark.parametrize("options", [DROPOUT, SEGMENTS], ids=["dropout, causal", "segments"])
def test_parts_merge_to_the_whole(name: str, options: dict[str, Any]) -> None:
    passes, settings = prepared(name)
    if name == "hopper":
        options = {option: x for option, x in options.items() if "dropout" not in option}
    full = forward(passes, settings, whole(**options))
    parts = [forward(passes, settings, sliced(keys, **options)) for keys in PARTS]
    assert_merges(parts, full)
    if "q_segment_ids" in options:
        assert (parts[1].lse[..., :4] == -jnp.inf).all()
        out, lse = merged(parts)
        np.testing.assert_array_equal(out[:, 19], 0.0)
        np.testing.assert_array_equal(lse[..., 19], -np.inf)


@pytest.mark.parametrize("name", ["xla", "xla in one piece"])
@hypothesis_settings(max_examples=10)
@given(order=st.permutations(range(K)), seed=st.integers(0, 99))
def test_keys_in_any_parts_merge_to_the_whole(name: str, order: list[int], seed: int) -> None:
    """XLA keeps weights in float32, so any arrays do, and knows the positions of keys."""
    passes, settings = prepared(name)
    rng = np.random.default_rng(seed)
    arrays = [jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16) for x in (QUERY, KEY, VALUE)]
    call = partial(positioned, query=arrays[0], key=arrays[1], value=arrays[2], causal=True)
    full = forward(passes, settings, call(np.arange(K)))
    parts = [forward(passes, settings, call(np.sort(order[keys]))) for keys in PARTS]
    assert_merges(parts, full)


@kernels
def test_unrounded_gradients_of_parts_sum_to_those_of_the_whole(name: str) -> None:
    """With the lse and Delta of the whole; those of keys, values and the bias stand side by side."""
    passes, settings = prepared(name)
    options = {"causal": True, "bias": BIAS}
    full = whole(**options)
    result = forward(passes, settings, full)

    def gradients(call: Call, kept: Any) -> Backward:
        hides = hides_pairs(call) and not passes.cleans_rows
        d_lse = jnp.zeros_like(result.lse)
        terms = row_terms(call, result.out, result.lse, result.row_max, D_OUT, d_lse, True, hides)
        return backward(passes, settings, call, terms, kept)

    want = gradients(full, result.kept)
    parts = [gradients(sliced(keys, **options), None) for keys in PARTS]
    found = {
        "query": parts[0].query + parts[1].query,
        "key": jnp.concatenate([x.key for x in parts], axis=1),
        "value": jnp.concatenate([x.value for x in parts], axis=1),
        "bias": jnp.concatenate([jnp.asarray(x.bias) for x in parts], axis=3),
    }
    for which, x in found.items():
        expected = jnp.asarray(getattr(want, which))
        assert {x.dtype, expected.dtype} == {np.dtype(np.float32)}
        np.testing.assert_allclose(x, expected, rtol=4e-6, atol=1e-5)
        # They are unrounded: most numbers have bits that bfloat16 does not hold.
        narrow = expected.astype(jnp.bfloat16).astype(jnp.float32)
        assert (narrow != expected)[expected != 0].mean() > 0.9


@kernels
def test_rounding_last_gives_the_ordinary_results(name: str) -> None:
    """The numerator too, where out is not normalised."""
    passes, settings = prepared(name, normalize_output=False)
    call = whole(causal=True)
    ordinary, exact = (
        forward(passes, replace(settings, unrounded=unrounded), call) for unrounded in (False, True)
    )
    assert ordinary.out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ordinary.out, exact.out.astype(jnp.bfloat16))
    np.testing.assert_array_equal(ordinary.lse, exact.lse)
    np.testing.assert_array_equal(ordinary.row_max, exact.row_max)


@pytest.mark.parametrize("name", ["xla", "xla in one piece"])
@pytest.mark.parametrize("keys", [K, 0])
def test_an_unrounded_call_is_differentiable(name: str, keys: int) -> None:
    """Its out is float32, without keys too; cotangents have the dtypes of the arguments."""
    passes, settings = prepared(name)

    def run(settings: Settings, query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array]:
        return attend(passes, settings, check_call(query, key, value, softmax_scale=SCALE))

    arrays = QUERY, KEY[:, :keys], VALUE[:, :keys]
    (out, lse), pull = jax.vjp(partial(run, settings), *arrays)
    found = pull((D_OUT.astype(jnp.float32), lse * 0 if keys else jnp.zeros_like(lse)))
    (ordinary, _), pull = jax.vjp(partial(run, replace(settings, unrounded=False)), *arrays)
    assert (out.dtype, ordinary.dtype) == (jnp.float32, jnp.bfloat16)
    for one, other in zip(found, pull((D_OUT, jnp.zeros_like(lse))), strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (one, other)), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_that_see_nothing_merge_to_nothing(parts: int) -> None:
    """Whatever is stored in out."""
    out, lse = merge_parts(jnp.full((parts, 1, 2, 3, 4), jnp.nan), jnp.full((parts, 1, 3, 2), -jnp.inf))
    np.testing.assert_array_equal(out, np.zeros((1, 2, 3, 4)))
    np.testing.assert_array_equal(lse, np.full((1, 3, 2), -np.inf))


def test_equal_parts_of_huge_lse_have_equal_shares() -> None:
    """The lse of the whole is rounded by 1/32 here; its shares are not."""
    out, lse = merge_parts(jnp.ones((3, 1, 1, 1, 1)), jnp.full((3, 1, 1, 1), 1e6))
    np.testing.assert_allclose(out, 1.0, rtol=3e-7)
    np.testing.assert_allclose(lse, 1e6 + np.log(3), rtol=1e-7)


def test_a_part_that_a_row_does_not_see_changes_no_bit() -> None:
    out, lse = jnp.asarray(RNG.normal(size=(1, 1, 2, 3, 4)), jnp.float32), jnp.full((1, 1, 3, 2), 1e6)
    with_nothing = merge_parts(
        jnp.concatenate([jnp.zeros_like(out), out]), jnp.concatenate([jnp.full_like(lse, -jnp.inf), lse])
    )
    np.testing.assert_array_equal(with_nothing[0], out[0])
    np.testing.assert_array_equal(with_nothing[1], lse[0])


LSES = st.lists(st.floats(-1e3, 1e3, width=32) | st.just(-np.inf), min_size=1, max_size=5)


@given(LSES)
def test_a_merge_is_that_of_float64(lses: list[float]) -> None:
    parts = len(lses)
    values = np.linspace(-1, 1, parts, dtype=np.float32) if parts > 1 else np.ones(1, np.float32)
    values = np.where(np.equal(lses, -np.inf), np.float32(0), values)
    logits = np.array(lses, np.float32)
    out, lse = merge_parts(
        jnp.asarray(values).reshape(parts, 1, 1, 1, 1), jnp.asarray(logits).reshape(parts, 1, 1, 1)
    )
    wide = logits.astype(np.float64)
    if (wide == -np.inf).all():
        assert (out.item(), lse.item()) == (0.0, -np.inf)
        return
    weights = np.exp(wide - wide.max())
    np.testing.assert_allclose(out.item(), (weights * values).sum() / weights.sum(), rtol=0, atol=5e-7)
    np.testing.assert_allclose(lse.item(), wide.max() + np.log(weights.sum()), rtol=3e-7, atol=3e-7)


def test_the_merge_of_sums_is_that_of_normalised_results() -> None:
    """`merge_sums` takes sums in bits, `merge_parts` what an implementation returns."""
    shape = (3, BATCH, HEADS, Q)
    norm = jnp.asarray(RNG.uniform(0.5, 2, shape), jnp.float32)
    bits = jnp.asarray(RNG.normal(size=shape), jnp.float32)
    total = jnp.asarray(RNG.normal(size=(*shape, VALUE_DIM)), jnp.float32)
    sums = merge_sums(Partial(total, norm, bits))
    outs = (total / norm[..., None]).swapaxes(2, 3)
    out, lse = merge_parts(outs, bits * SCALE + jnp.log(norm))
    np.testing.assert_allclose(out.swapaxes(1, 2), sums.total[0] / sums.norm[0][..., None], **TOLERANCE)
    np.testing.assert_allclose(lse, sums.reference[0] * SCALE + jnp.log(sums.norm[0]), **TOLERANCE)
