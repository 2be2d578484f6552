"""Kernels that hold the row maximum constant, or differentiate it, are each held to what they declare."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attest.conformance.cases.case import Case
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge
from attest.conformance.subject import Subject
from attest.reference.numerics import Numerics
from attest.reference.semantics import STANDARD

CASE = Case(q_len=5, kv_len=9, q_heads=2, kv_heads=2, head_dim=4, value_dim=3, normalized=False, seed=3)
CASES = {
    "plain": CASE,
    "causal": replace(CASE, causal=True, q_len=9),
    "sinks": replace(CASE, sinks=3, sinks_per_head=True),
    "one key": replace(CASE, kv_len=1),
    "cap": replace(CASE, soft_cap=1.5),
    "cap and sinks": replace(CASE, soft_cap=0.5, sinks=1, sinks_per_head=True),
    "integers": replace(CASE, family="integers", scale=1.0),
    "all tie": replace(CASE, scale=0.0),
    "bias": replace(CASE, bias="b1q"),
}


def kernel(differentiated: bool) -> Any:
    """Materialised attention that is not normalised, differentiated by JAX."""

    def call(
        query: Any,
        key: Any,
        value: Any,
        *,
        normalize_output: bool = True,
        causal: bool = False,
        softmax_scale: float | None = None,
        softmax_aux: Any = None,
        logits_soft_cap: float | None = None,
        bias: Any = None,
    ) -> Any:
        assert not normalize_output
        q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
        scale = query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * scale
        if bias is not None:
            logits = logits + bias.astype(jnp.float32)
        if logits_soft_cap is not None:
            logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
        seen = jnp.ones(logits.shape[2:], bool)
        if causal:
            seen = jnp.tril(seen)
        logits = jnp.where(seen, logits, -jnp.inf)
        top = logits.max(axis=-1, keepdims=True)
        if softmax_aux is not None:
            top = jnp.maximum(top, softmax_aux.astype(jnp.float32).max(axis=-1)[None, :, None, None])
        top = top if differentiated else jax.lax.stop_gradient(top)
        weights = jnp.where(seen, jnp.exp(logits - top), 0.0)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest").astype(query.dtype)

    return call


def subject(differentiates: bool, declared: Any) -> Subject:
    return Subject(
        "toy",
        kernel(differentiates),
        features=frozenset(
            {"unnormalized", "causal", "value_dim", "scale", "sinks", "soft_cap", "bias"},
        ),
        dtypes=("float32", "bfloat16"),
        semantics=replace(STANDARD, row_max_gradient=declared),
        numerics=lambda dtype, tiling: Numerics(output_dtype=dtype, materialised=True),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("differentiates", [False, True])
def test_a_kernel_conforms_to_what_it_declares(name: str, dtype: str, differentiates: bool) -> None:
    declared = subject(differentiates, "differentiated" if differentiates else "constant")
    for seed in range(3, 8):
        case = replace(CASES[name], dtype=dtype, seed=seed)
        (result,) = judge(declared, case, ("gradients",))
        assert result.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE), result.message


@pytest.mark.parametrize("name", sorted(set(CASES) - {"one key", "all tie"}))
@pytest.mark.parametrize("differentiates", [False, True])
def test_a_kernel_that_declares_the_other_fails(name: str, differentiates: bool) -> None:
    declared = subject(differentiates, "constant" if differentiates else "differentiated")
    (result,) = judge(declared, CASES[name], ("gradients",))
    assert result.verdict is Verdict.FAIL
