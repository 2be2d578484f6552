"""What the Triton kernels promise beside the clauses: dtypes, wide heads, sizes of each kernel, refusals."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from attest.kernels.triton import BackwardSizes, BlockSizes, flash_attention, flash_attention_with_lse
from attest.kernels.visibility import tile_order
from tests.kernels.feature_cases import FEATURES, assert_close, expected, problem
from tests.kernels.implementations import TRITON
from tests.kernels.interpreted import needs_interpreter
from tests.kernels.kernel_cases import normal, plain_attention, qkv


@needs_interpreter
@pytest.mark.parametrize(("name", "dtype"), [*zip(FEATURES, itertools.cycle(["bfloat16", "float16"]))])
def test_low_precision_equals_the_clauses(name, dtype):
    """P and dS are rounded to the inputs' dtype, and results once more; lse is not."""
    options, *case = problem(name, dtype)
    (out, lse), gradients = TRITON.under(options)(*case)
    (want, want_lse), want_gradients = expected(name, dtype)
    assert {x.dtype for x in jax.tree.leaves((out, gradients))} == {jnp.dtype(dtype)}
    assert_close(lse, want_lse)
    eps = float(jnp.finfo(dtype).eps)
    for got, wanted in zip(
        jax.tree.leaves((out, gradients)), jax.tree.leaves((want, want_gradients)), strict=True
    ):
        assert_close(got, wanted, rtol=2 * eps, atol=2 * eps * max(1, float(abs(wanted).max())))


@needs_interpreter
def test_each_backward_kernel_has_its_block_sizes():
    """S18; None among them is the table's choice."""
    options, *case = problem("dropout, bias")
    sizes = {
        "fwd_params": BlockSizes(64, 16),
        "bwd_params": BackwardSizes(
            query=BlockSizes(16, 32), key=BlockSizes(32, 16), bias=BlockSizes(16, 64)
        ),
    }
    wanted = expected("dropout, bias")
    assert_close(TRITON.under(options | sizes)(*case), wanted)
    assert_close(TRITON.under(options | {"bwd_params": BackwardSizes(key=BlockSizes(16, 64))})(*case), wanted)


@needs_interpreter
@pytest.mark.parametrize("cache", [1, 20_000, 2**20])
def test_the_order_of_tiles_changes_nothing(cache, monkeypatch):
    """S18; one key head at a time, two in a group with one left over, and all at once."""
    monkeypatch.setattr(tile_order, "L2_BYTES", cache)
    arrays = qkv(batch=1, q_heads=6, k_heads=3, head_dim=32)
    cotangents = normal(1, 40, 6, 16, seed=8), normal(1, 6, 40, seed=9)
    want, vjp = jax.vjp(lambda arrays: plain_attention(*arrays, {"causal": True}, {})[:2], arrays)
    assert_close(
        TRITON.under({"causal": True, "fwd_params": BlockSizes(16, 16)})(arrays, {}, cotangents),
        (want, (*vjp(cotangents), {})),
    )


@needs_interpreter
@pytest.mark.parametrize(("head_dim", "value_dim"), [(136, 16), (16, 200), (256, 256)])
def test_wide_heads(head_dim, value_dim):
    """There dkey and dvalue are summed by launches of their own."""
    arrays = qkv(batch=1, q_heads=2, k_heads=1, head_dim=head_dim, value_dim=value_dim)
    cotangents = normal(1, 40, 2, value_dim, seed=8), normal(1, 2, 40, seed=9)
    options = {"causal": True}
    want, vjp = jax.vjp(lambda arrays: plain_attention(*arrays, options, {})[:2], arrays)
    got = TRITON.under(options)(arrays, {}, cotangents)
    assert_close(got, (want, (*vjp(cotangents), {})), atol=1e-4)


@needs_interpreter
@pytest.mark.parametrize("dims", [{"head_dim": 257}, {"value_dim": 300}])
def test_wider_heads_are_not_supported(dims):
    with pytest.raises(NotImplementedError, match=rf"the call has {max(dims.values())}\. Use platform=.xla"):
        flash_attention(*qkv(batch=1, **dims))


@needs_interpreter
@pytest.mark.parametrize(
    "precision",
    [
        *("highest", "float32", "default", "fastest", "tensorfloat32"),
        *(jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT),
    ],
)
def test_precisions(precision):
    """In the interpreter they are one and the same."""
    arrays = qkv(batch=1, q_length=5, k_length=7)
    got = flash_attention_with_lse(*arrays, precision=precision)
    assert_close(got, flash_attention_with_lse(*arrays))


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fwd_params", {"fwd_params": (64, 64)}),
        ("fwd_params", {"fwd_params": BackwardSizes()}),
        ("bwd_params", {"bwd_params": {"q": 16}}),
        ("precision", {"precision": "most"}),
        ("precision", {"precision": ["highest"]}),
        ("normalize_output", {"normalize_output": 1}),
        ("logits_dtype", {"logits_dtype": "int8"}),
    ],
)
def test_malformed_parameters_are_refused_by_name(name, options):
    """S20."""
    with pytest.raises(ValueError, match=f"^{name}: got .*; expected ") as refusal:
        flash_attention(*qkv(batch=1), **options)
    assert "\n" not in str(refusal.value)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="is about CPUs")
def test_a_cpu_is_told_what_to_do():
    with pytest.raises(NotImplementedError) as refusal:
        flash_attention(*qkv(batch=1, q_length=1, k_length=1))
    assert str(refusal.value) == (
        "attest.kernels.triton: JAX runs on cpu, expected a GPU. Use attest.kernels.xla there, or start "
        "the process with TRITON_INTERPRET=1 to run the kernels in Triton's interpreter."
    )
