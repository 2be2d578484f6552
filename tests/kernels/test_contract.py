"""The contract of an implementation: a record and two functions make a whole kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest import flash_attention, flash_attention_with_lse
from attest.kernels import xla
from attest.kernels.contract import Backward, Capabilities, Forward, Implementation, Passes
from attest.kernels.visibility.intervals import describe_rows
from tests.kernels.kernel_cases import qkv


def _weights(call):
    """P [B, H, Sq, Sk] and the row maximum of a call with as many key heads as query heads."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", call.query, call.key) * call.softmax_scale
    last = describe_rows(call).last
    if last is not None:
        hidden = jnp.arange(call.key.shape[1])[None, None] > last[..., None]
        logits = jnp.where(hidden[:, None], -jnp.inf, logits)
    return logits, logits.max(axis=-1)


def _forward(settings, call):
    logits, top = _weights(call)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return Forward(jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(logits - lse[..., None]), call.value), lse, top)


def _backward(settings, call, terms, kept):
    logits, _ = _weights(call)
    weights = jnp.exp(logits - terms.lse[..., None])
    of_weights = jnp.einsum("bqhd,bkhd->bhqk", terms.d_out, call.value)
    of_logits = weights * (of_weights - terms.delta[..., None]) * call.softmax_scale
    return Backward(
        jnp.einsum("bhqk,bkhd->bqhd", of_logits, call.key),
        jnp.einsum("bhqk,bqhd->bkhd", of_logits, terms.query),
        jnp.einsum("bhqk,bqhd->bkhd", weights, terms.d_out),
        None,
    )


TOY = Implementation(
    "toy", Capabilities(dtypes=("float32",), dropout=False), lambda: Passes(_forward, _backward)
)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "q_offset": 9}], ids=str)
def test_a_toy_of_one_record_and_two_functions_attends(options):
    query, key, value = qkv(q_heads=2, k_heads=2)

    def both(platform):
        def total(*arrays):
            out, lse = flash_attention_with_lse(*arrays, **options, platform=platform)
            return (out * jnp.cos(out)).sum() + lse.sum()

        return jax.value_and_grad(total, argnums=(0, 1, 2))(query, key, value)

    (got, gradients), (want, expected) = both(TOY), both("xla")
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_a_toy_has_the_shared_steps():
    """Empty calls, and the lse of padding, need nothing of an implementation."""
    query, key, value = qkv(q_heads=2, k_heads=2)
    sinks = jnp.ones((2, 1))
    out, lse = flash_attention_with_lse(query, key[:, :0], value[:, :0], softmax_aux=sinks, platform=TOY)
    np.testing.assert_array_equal(out, jnp.zeros_like(out))
    np.testing.assert_allclose(lse, 1.0)
    gradient = jax.grad(lambda q: flash_attention(q, key[:, :0], value[:, :0], platform=TOY).sum())(query)
    np.testing.assert_array_equal(gradient, jnp.zeros_like(query))


def test_a_toy_refuses_what_it_does_not_declare():
    arrays = qkv(q_heads=2, k_heads=2)
    with pytest.raises(NotImplementedError, match=r"^toy: takes no dropout_prob above 0"):
        flash_attention(*arrays, dropout_prob=0.5, dropout_seed=1, platform=TOY)
    for name in ("fwd_params", "bwd_params"):
        with pytest.raises(ValueError, match=rf"^{name}: got 3; expected None"):
            flash_attention(*arrays, **{name: 3}, platform=TOY)
    with pytest.raises(ValueError, match=r"^precision: got .highest.; expected one of None"):
        flash_attention(*arrays, precision="highest", platform=TOY)


def test_padding_has_the_lse_of_no_key_without_queries_or_keys():
    """S9 holds where there is nothing to attend to, too."""
    query, key, value = qkv(batch=1)
    ids = {
        "q_segment_ids": np.where(np.arange(query.shape[1]) < 5, 0, -1)[None],
        "kv_segment_ids": np.zeros((1, 0), int),
    }
    _, lse = xla.flash_attention_with_lse(
        query, key[:, :0], value[:, :0], softmax_aux=jnp.ones((1, 2)), **ids
    )
    assert jnp.isfinite(lse[..., :5]).all()
    assert (lse[..., 5:] == -jnp.inf).all()
