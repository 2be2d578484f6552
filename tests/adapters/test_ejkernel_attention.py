"""`attention` of ejKernel against the oracle: its dtype, rows, sinks, masks and dropout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.kernels.adapters import ejkernel
from attest.reference.oracle import attention as oracle
from attest.reference.problem import make_problem
from tests.adapters.exact import assert_close, assert_exact
from tests.adapters.test_ejkernel_modules import (
    BIAS,
    CROSS,
    HKV,
    HQ,
    MASK,
    SELF,
    SINKS,
    SK,
    B,
    S,
    in_order,
    normal,
)

pytestmark = pytest.mark.found_outside


def weights_of(**options: Any) -> np.ndarray:
    return np.asarray(ejkernel.attention(**CROSS, dtype=jnp.float32, **options)[1])


def test_attention_returns_its_weights_in_bfloat16() -> None:
    out, weights = ejkernel.attention(**CROSS)
    assert (out.dtype, out.shape) == (jnp.bfloat16, (B, S, HQ, 6))
    assert (weights.dtype, weights.shape) == (jnp.bfloat16, (B, HQ, S, SK))
    assert ejkernel.attention(**CROSS, dtype=None)[0].dtype == np.float32


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, 2), (True, (2, 3))])
def test_attention_counts_from_the_first_key(causal: bool, window: Any) -> None:
    seen = in_order(causal, (window, window) if isinstance(window, int) else window, 0)

    def call(**arrays: Any) -> jax.Array:
        return ejkernel.attention(**arrays, dtype=jnp.float32, causal=causal, sliding_window=window)[0]

    assert_exact(call, CROSS, options={"attention_mask": seen})


GROUPS = np.repeat(np.arange(HKV), HQ // HKV)
PER_HEAD = normal(HQ, 3, seed=9)


@pytest.mark.parametrize(
    ("sinks", "meant"),
    [
        (SINKS, SINKS[:, None]),
        (SINKS[:HKV], SINKS[:HKV][GROUPS][:, None]),
        (SINKS[:3], np.broadcast_to(SINKS[:3], (HQ, 3))),
        (PER_HEAD, PER_HEAD),
        (PER_HEAD[:HKV], PER_HEAD[GROUPS]),
        (PER_HEAD[:1], np.broadcast_to(PER_HEAD[:1], (HQ, 3))),
    ],
)
def test_sinks_of_attention(sinks: np.ndarray, meant: np.ndarray) -> None:
    """[n] is one for each query head, or each key head, if there are as many."""

    def call(**arrays: Any) -> jax.Array:
        return ejkernel.attention(**arrays, softmax_aux=sinks, dtype=jnp.float32)[0]

    assert_exact(call, CROSS, options={"softmax_aux": meant.copy()})


def test_masks_and_biases_of_attention() -> None:
    """Of two axes a mask is one of keys, of three one for each batch entry; heads may be those of keys."""
    keys, pairs = MASK[:, 0, 0], MASK[:, 0]
    of_groups = np.random.default_rng(10).integers(0, 3, (B, HKV, S, S)) > 0
    for mask, meant in ((keys, keys[:, None, None]), (pairs, MASK), (of_groups, of_groups[:, GROUPS])):
        call = lambda **x: ejkernel.attention(**x, attention_mask=mask, dtype=jnp.float32)[0]  # noqa: B023, E731
        whole = np.broadcast_to(meant, (B, meant.shape[1], S, S))
        assert_exact(call, SELF, options={"attention_mask": whole})
    got = ejkernel.attention(**SELF, bias=BIAS[:, :HKV], dtype=jnp.float32)[0]
    assert_close("out", got, oracle(make_problem(**SELF, bias=BIAS[:, :HKV][:, GROUPS])).out, 2e-5)


def test_a_bias_is_made_only_where_there_is_no_mask() -> None:
    plain, biased = ejkernel.attention(**SELF)[0], ejkernel.attention(**SELF, bias=BIAS)[0]
    np.testing.assert_array_equal(ejkernel.attention(**SELF, init_bias=lambda: BIAS)[0], biased)
    masked = ejkernel.attention(**SELF, attention_mask=MASK, init_bias=lambda: BIAS)[0]
    np.testing.assert_array_equal(masked, ejkernel.attention(**SELF, attention_mask=MASK)[0])
    assert not np.array_equal(plain, biased)


def test_dropout_of_attention() -> None:
    def dropped(seed: int, **options: Any) -> np.ndarray:
        key = jax.random.PRNGKey(seed)
        return weights_of(dropout_rng=key, dropout_prob=0.25, **options) == 0

    assert not dropped(0).any()
    shares = [dropped(seed, deterministic=False) for seed in (0, 1)]
    assert all(0.1 < share.mean() < 0.4 for share in shares)
    assert (shares[0] != shares[1]).any()
