"""The counter of calls: what runs is counted, also in a compiled program, and what is only traced is not."""

import jax
import jax.numpy as jnp
import pytest

from tests.peer_suites.calls import Calls, counted_by

X = jnp.ones(3)


def doubled(x: jax.Array) -> jax.Array:
    if x.ndim != 1:
        raise ValueError("x: got two axes; expected one.")
    return 2 * x


def test_each_run_is_counted() -> None:
    calls = Calls()
    compiled = jax.jit(counted_by(calls, doubled))
    assert compiled(X)[0] == 2
    assert compiled(X)[0] == 2
    assert counted_by(calls, doubled)(X)[0] == 2
    jax.effects_barrier()
    assert calls == Calls(3)


def test_a_run_is_counted_where_it_is_differentiated() -> None:
    calls = Calls()
    counted = counted_by(calls, doubled)
    assert jax.jit(jax.grad(lambda x: counted(x).sum()))(X)[0] == 2
    jax.effects_barrier()
    assert calls.ran == 1


def test_a_call_that_is_only_traced_does_not_run() -> None:
    calls = Calls()
    assert jax.eval_shape(counted_by(calls, doubled), X).shape == (3,)
    jax.jit(counted_by(calls, doubled)).lower(X).compile()
    jax.effects_barrier()
    assert calls == Calls()


def test_a_program_of_symbolic_sizes_is_counted_when_it_is_traced() -> None:
    calls = Calls()
    (size,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(counted_by(calls, doubled)))(jax.ShapeDtypeStruct((size,), X.dtype))
    assert "callback" not in exported.mlir_module()
    assert calls == Calls(1)


def test_a_refusal_is_kept_and_raised() -> None:
    calls = Calls()
    with pytest.raises(ValueError, match="two axes"):
        counted_by(calls, doubled)(X[None])
    assert calls == Calls(0, ["ValueError: x: got two axes; expected one."])
