"""What accelerators run of `xla`, on this device: how a call is cut, and that float16 does not overflow."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.conformance.subject import find
from attest.kernels.call.call import check_call
from attest.kernels.contract import Settings
from attest.kernels.xla import flash_attention_with_lse, pieces, whole
from tests.kernels.kernel_cases import qkv


def cuts(limits, **options):
    """The rows and keys of each kind of piece, and how many there are."""
    call = check_call(*qkv(batch=2, q_length=64, k_length=64), **options)
    limits = {**pieces.LIMITS, "part_rows": 8, "alignment": 8, **limits}
    blocks = pieces._blocks(call, whole.rows_of(call), limits["forward_logits"], limits, whole_keys=True)
    return [(x.first.row, x.first.rows, x.first.key, x.first.keys, x.counts) for x in blocks]


def test_a_call_that_fits_is_one_piece():
    assert cuts({}) == [(0, 64, 0, 64, (1, 1, 1))]


def test_causal_order_cuts_rows_into_parts_with_their_own_keys():
    assert cuts({}, causal=True) == [(16 * i, 16, 0, 16 * (i + 1), (1, 1, 1)) for i in range(4)]


def test_entries_are_cut_before_rows():
    heads = 4
    assert cuts({"forward_logits": heads * 64 * 64}) == [(0, 64, 0, 64, (2, 1, 1))]
    assert cuts({"forward_logits": heads * 16 * 64}) == [(0, 16, 0, 64, (2, 4, 1))]


def test_no_compiler_stores_a_mask_of_keys_for_all_pairs():
    """XLA selects by an argument in the kernel of the product, which reads it for all pairs."""
    query, key, value = qkv(batch=2, q_length=64, k_length=64)
    settings = Settings(None, None, True, None, "float32")

    def forward(query, **options):
        return pieces.forward(settings, check_call(query, key, value, **options), limits=pieces.LIMITS).out

    def barriers(**options):
        program = jax.make_jaxpr(lambda x: forward(x, **options))(query)
        return str(program).count("= optimization_barrier")

    assert barriers() == 0
    assert barriers(attention_mask=jnp.ones((2, 1, 1, 64), bool)) > 0
    assert barriers(attention_mask=jnp.ones((2, 4, 64, 64), bool)) > 0


@pytest.mark.found_outside
@pytest.mark.parametrize(("length", "head_dim", "operands"), [(9, 3, "f32"), (96, 16, "f16")])
def test_tiny_products_are_those_of_float32(length, head_dim, operands):
    """XLA on GPUs rounds products of float16 to float16 where it takes matrices for too small."""
    sizes = {"q_length": length, "k_length": length, "head_dim": head_dim, "value_dim": head_dim}
    arrays = [x.astype(jnp.float16) for x in qkv(**sizes)]

    def both(*arrays):
        out, pull = jax.vjp(lambda *x: find("xla.pieces").call(*x)[0], *arrays)
        return pull(out)

    text = jax.jit(both).lower(*arrays).as_text()
    products = re.findall(
        r"stablehlo.dot_general .* : \(tensor<[0-9x]+x(\w+)>, tensor<[0-9x]+x(\w+)>\)", text
    )
    # Five of the passes; that of dO and out, for Delta, is one of float32.
    assert products.count((operands, operands)) >= 5
    assert ("f16" in {kind for pair in products for kind in pair}) == (operands == "f16")


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"sliding_window": (9, 3)}, {"dropout_prob": 0.3, "dropout_seed": 4}]
)
def test_pieces_and_tiles_agree(options):
    arrays = qkv(q_length=40, k_length=52)
    got, want = (
        jax.vjp(lambda *x, call=call: call(*x, **options)[0], *arrays)
        for call in (find("xla.pieces").call, flash_attention_with_lse)
    )
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)
    for a, b in zip(got[1](want[0]), want[1](want[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("k_length", [29, 33, 64])
def test_gradients_of_queries_add_up_over_keys_cut_in_uneven_pieces(k_length):
    arrays = [x.astype(jnp.bfloat16) for x in qkv(q_length=40, k_length=k_length)]
    got, want = (
        jax.vjp(lambda *x, call=call: call(*x)[0], *arrays)
        for call in (find("xla.pieces").call, flash_attention_with_lse)
    )
    for a, b in zip(got[1](want[0]), want[1](want[0]), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=0.03)


def test_gradients_of_float16_do_not_overflow_before_they_are_rounded():
    """dS of 1e6 is finite times a small key, and so is its scaled product."""
    query, key, value = (x.astype(jnp.float16) for x in qkv(q_length=8, k_length=8))
    query, key, value = query * 1e-3, key * 1e-3, value * 1000
    _, pull = jax.vjp(lambda *x: find("xla.pieces").call(*x)[0], query, key, value)
    _, exact = jax.vjp(
        lambda *x: flash_attention_with_lse(*x)[0], *(x.astype(jnp.float32) for x in (query, key, value))
    )
    d_out = jnp.full(query.shape[:3] + value.shape[3:], 1000, jnp.float16)
    for a, b in zip(pull(d_out), exact(d_out.astype(jnp.float32)), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0.05, atol=0.02 * float(jnp.abs(b).max()))
