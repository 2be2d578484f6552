"""ONNX's operator `Attention` on our kernels, against its text in JAX.

`nox -s peer-tests` runs ONNX's own cases.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.kernels.adapters.onnx import attention
from tests.adapters.roundings import check
from tests.kernels.kernel_cases import normal

BATCH, HEADS, KEY_HEADS, ROWS, KEYS, DEPTH, WIDTH, PAST = 2, 4, 2, 5, 7, 8, 6, 3
Q = normal(BATCH, HEADS, ROWS, DEPTH)
K, V = normal(BATCH, KEY_HEADS, KEYS, DEPTH, seed=2), normal(BATCH, KEY_HEADS, KEYS, WIDTH, seed=3)
PAST_KEYS = {
    "past_key": normal(BATCH, KEY_HEADS, PAST, DEPTH, seed=4),
    "past_value": normal(BATCH, KEY_HEADS, PAST, WIDTH, seed=5),
}
MASK = (normal(BATCH, 1, ROWS, KEYS, seed=6) > -0.5).at[..., 0].set(True)
BIAS = normal(HEADS, ROWS, KEYS, seed=7)
HIDING = jnp.where(MASK, jnp.float32(0), -jnp.inf)
LENGTHS = jnp.array([6, 3], jnp.int32)
HEAD_COUNTS = {"q_num_heads": HEADS, "kv_num_heads": KEY_HEADS}
CAUSAL = {"is_causal": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": CAUSAL,
    "causal with a past": {**CAUSAL, **PAST_KEYS},
    "a past": PAST_KEYS,
    "lengths": {"nonpad_kv_seqlen": LENGTHS},
    "causal with lengths": {**CAUSAL, "nonpad_kv_seqlen": LENGTHS},
    "mask": {"attn_mask": MASK},
    "a short mask": {**CAUSAL, "attn_mask": MASK[..., :4]},
    "a mask of keys": {**CAUSAL, "attn_mask": MASK[0, 0, 0]},
    "bias": {"attn_mask": BIAS},
    "a short bias": {"attn_mask": BIAS[..., :4]},
    "softcap": {"softcap": 1.5},
    "softcap and mask": {"softcap": 1.5, "attn_mask": MASK},
    "softcap and a float mask": {"softcap": 1.5, "attn_mask": HIDING},
    "a left window": {**CAUSAL, "left_window_size": 2},
    "a window": {"left_window_size": 0, "right_window_size": 1},
    "a window with a past": {"left_window_size": 2, "right_window_size": 0, **PAST_KEYS},
    "a window with lengths": {"left_window_size": 2, "nonpad_kv_seqlen": LENGTHS},
    "all": {**CAUSAL, **PAST_KEYS, "attn_mask": MASK, "softcap": 2.0, "scale": 0.4, "left_window_size": 4},
}


def of_onnx(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    nonpad_kv_seqlen: Any = None,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> list[Any]:
    """The output, and the scores of the four modes, for inputs of four axes, in the order of ONNX's text."""
    if past_key is not None:
        k, v = jnp.concatenate([past_key, k], 2), jnp.concatenate([past_value, v], 2)
    group, rows, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
    offset = jnp.zeros((1, 1, 1, 1), int) if past_key is None else jnp.full((1, 1, 1, 1), past_key.shape[2])
    seen = jnp.ones((1, 1, rows, keys), bool)
    at = jnp.arange(keys)
    if nonpad_kv_seqlen is not None:
        offset = nonpad_kv_seqlen[:, None, None, None] - rows
        seen &= at < nonpad_kv_seqlen[:, None, None, None]
    ahead = at - (jnp.arange(rows)[:, None] + offset)
    if is_causal:
        seen &= ahead <= 0
    if left_window_size >= 0:
        seen &= -ahead <= left_window_size
    if right_window_size >= 0:
        seen &= ahead <= right_window_size
    bias = 0.0
    if attn_mask is not None:
        is_bool = attn_mask.dtype == bool
        missing = [(0, 0)] * (attn_mask.ndim - 1) + [(0, keys - attn_mask.shape[-1])]
        filled = jnp.pad(attn_mask, missing, constant_values=False if is_bool else -jnp.inf)
        seen, bias = (seen & filled, 0.0) if is_bool else (seen & ~jnp.isneginf(filled), filled)
    products = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    capped = softcap * jnp.tanh(products / softcap) if softcap else products
    logits = jnp.where(seen, capped + bias, -jnp.inf)
    some = jnp.any(seen, -1, keepdims=True)
    weights = jnp.where(some, jax.nn.softmax(jnp.where(some, logits, 0.0)), 0.0)
    return [weights @ v, products, capped, logits, weights]


@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients_are_those_of_onnx(name: str) -> None:
    options = OPTIONS[name]
    floats = {
        x: y for x, y in options.items() if getattr(y, "dtype", None) == jnp.float32 and y is not HIDING
    }
    rest = {x: y for x, y in options.items() if x not in floats}
    check(
        lambda q, k, v, floats: attention(q, k, v, **floats, **rest).Y,
        lambda q, k, v, floats: of_onnx(q, k, v, **floats, **rest)[0],
        Q,
        K,
        V,
        floats,
    )


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("name", ["causal with lengths", "a short bias", "softcap and mask", "all"])
def test_scores_are_those_of_onnx(name: str, mode: int) -> None:
    options = OPTIONS[name]
    found = attention(Q, K, V, **options, qk_matmul_output_mode=mode, with_qk_matmul_output=True)
    want = of_onnx(Q, K, V, **options)[1 + mode]
    np.testing.assert_allclose(found.qk_matmul_output, want, rtol=0, atol=4e-6)
    assert attention(Q, K, V, **options).qk_matmul_output is None


def test_inputs_of_three_axes() -> None:
    merged = [x.swapaxes(1, 2).reshape(BATCH, x.shape[2], -1) for x in (Q, K, V)]
    found = attention(*merged, **OPTIONS["all"], **HEAD_COUNTS)
    want = attention(Q, K, V, **OPTIONS["all"], **HEAD_COUNTS)
    np.testing.assert_array_equal(found.Y, want.Y.swapaxes(1, 2).reshape(BATCH, ROWS, -1))
    for name, new in (("key", K), ("value", V)):
        present = jnp.concatenate([PAST_KEYS[f"past_{name}"], new], axis=2)
        np.testing.assert_array_equal(getattr(found, f"present_{name}"), present)
        np.testing.assert_array_equal(getattr(want, f"present_{name}"), present)


def test_rows_before_the_first_key_are_zero() -> None:
    """Five queries and three keys: the first two are at positions before the keys."""
    out = attention(Q, K, V, is_causal=True, nonpad_kv_seqlen=LENGTHS).Y
    assert not out[1, :, :2].any()
    assert out[1, :, 2:].all()


def test_sixteen_bits_stay_so() -> None:
    arrays = [x.astype("bfloat16") for x in (Q, K, V)]
    found = attention(*arrays, softmax_precision=16, with_qk_matmul_output=True)
    assert found.qk_matmul_output is not None
    assert {found.Y.dtype, found.qk_matmul_output.dtype} == {jnp.dtype("bfloat16")}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two axes": ({"Q": Q[0, 0]}, r"Q: got shape \(5, 8\); expected 4 axes"),
    "no heads of queries": ({"Q": Q[:, 0]}, "q_num_heads: got None; .* because Q has 3 axes"),
    "no heads of keys": ({"K": K[:, 0]}, "kv_num_heads: got None"),
    "heads that do not divide": ({"Q": Q[:, 0], "q_num_heads": 3}, "q_num_heads: got 3; .* divisor of 8"),
    "other heads": ({"q_num_heads": 2}, "q_num_heads: got 2; expected 4, the heads of Q"),
    "values of another length": ({"V": V[:, :, :3]}, "V: got"),
    "a lone past": ({"past_key": PAST_KEYS["past_key"]}, "past_value: got None"),
    "another past": ({**PAST_KEYS, "past_value": PAST_KEYS["past_key"]}, r"past_value: got float32 of shape"),
    "a past of another dtype": (
        {**PAST_KEYS, "past_key": PAST_KEYS["past_key"].astype("float16")},
        "past_key: got float16",
    ),
    "a past and lengths": (
        {**PAST_KEYS, "nonpad_kv_seqlen": LENGTHS},
        "nonpad_kv_seqlen: got lengths beside past_key",
    ),
    "lengths past the keys": ({"nonpad_kv_seqlen": LENGTHS + 2}, "nonpad_kv_seqlen: got 8; .* from 0 to 7"),
    "an integer mask": ({"attn_mask": MASK.astype(int)}, "attn_mask: got dtype int32; expected bool or"),
    "a long mask": ({"attn_mask": jnp.ones((5, 8), bool)}, "attn_mask: got .* a last axis of 7 keys"),
    "a mask of all keys": ({"attn_mask": MASK[..., :1]}, "attn_mask: got .* fewer but more than 1"),
    "a mask of other rows": ({"attn_mask": MASK[:, :, :3]}, "attn_mask: got shape"),
    "five axes": ({"attn_mask": MASK[None]}, "attn_mask: got shape .* at most 4 axes"),
    "a flag": ({"is_causal": 2}, "is_causal: got 2; expected 0 or 1"),
    "a flag in words": ({"is_causal": "no"}, "is_causal: got 'no'"),
    "a window": ({"left_window_size": -2}, "left_window_size: got -2; expected -1"),
    "a right window": ({"right_window_size": 0.5}, "right_window_size: got 0.5"),
    "a mode": ({"qk_matmul_output_mode": 4}, "qk_matmul_output_mode: got 4; expected an integer from 0 to 3"),
    "scores": ({"with_qk_matmul_output": 1}, "with_qk_matmul_output: got 1"),
    "a scale": ({"scale": float("nan")}, "scale: got nan"),
    "a cap": ({"softcap": -1.0}, "softcap: got -1.0"),
    "no cap": ({"softcap": None}, "softcap: got None"),
    "a precision": ({"softmax_precision": 7}, "softmax_precision: got 7; expected 1, 10 or 16"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_malformed_is_refused_by_name(name: str) -> None:
    arguments, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        attention(**{"Q": Q, "K": K, "V": V, **arguments})


def test_values_that_onnx_adds_after_the_cap_are_refused() -> None:
    """Traced ones too, since nothing tells what they are."""
    for bias in (BIAS, HIDING.at[0, 0, 0, 0].set(0.5)):
        with pytest.raises(NotImplementedError, match=r"^attn_mask: got values to add beside a softcap"):
            attention(Q, K, V, bias, softcap=2.0)
    with pytest.raises(NotImplementedError, match=r"^attn_mask: got traced values beside a softcap"):
        jax.jit(lambda bias: attention(Q, K, V, bias, softcap=2.0).Y)(HIDING)


def test_a_softmax_in_float64_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"^softmax_precision: got 11, DOUBLE"):
        attention(Q, K, V, softmax_precision=11)
