"""The peer `jax.nn`: its adapter refuses what only it can see, traced or not."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attest.conformance.cases.case import Case
from attest.conformance.checks.transforms import TRANSFORMS
from attest.conformance.peers.jax_nn import SUBJECTS
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge

(SUBJECT,) = SUBJECTS
PADDED = Case(batch=2, q_len=4, kv_len=5, head_dim=4, lengths=((3, 4), (4, 5)), seed=5)


@pytest.mark.parametrize("transform", sorted(TRANSFORMS))
def test_a_padded_case_passes_under_every_transform(transform: str) -> None:
    """Under `grad_under_jit` the lengths are concrete, and everything computed from them is traced."""
    (result,) = judge(SUBJECT, PADDED, (f"transforms.{transform}",))
    assert result.verdict is Verdict.PASS, result.message


@pytest.mark.parametrize("traced", [False, True])
def test_lengths_that_do_not_start_at_0_are_refused_as_long_as_they_are_concrete(traced: bool) -> None:
    array = jnp.ones((2, 4, 1, 4))
    cum = jnp.array([1, 2, 4], jnp.int32)

    def call(query: Any) -> Any:
        return SUBJECT.call(query, array, array, cum_seqlens_q=cum, cum_seqlens_k=cum)

    with pytest.raises(ValueError, match="cum_seqlens_q: got 1 first"):
        (jax.jit(call) if traced else call)(array)
