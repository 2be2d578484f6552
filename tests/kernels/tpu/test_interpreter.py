"""S19: the interpreter of TPU kernels sees races, accesses outside arrays and what is not initialised."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attest.conformance.record import Verdict
from attest.reference.semantics import STANDARD
from tests.kernels.interpreted import needs_tpu_interpreter


def test_a_process_with_too_few_threads_is_refused() -> None:
    from attest.kernels.pallas.interpreter import interpreted

    with pytest.raises(RuntimeError, match=r"got PJRT_NPROC='', expected at least 8"), interpreted(0):
        pass


def run(kernel: Any, x: jax.Array, grid: int, spec: Any, out_spec: Any, semantics: Any, **more: Any) -> Any:
    """One array in, one of its shape out; blocks are rows of 8."""
    from attest.kernels.pallas.interpreter import interpreted

    with interpreted(0):
        call = pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(grid,),
            in_specs=[spec],
            out_specs=out_spec,
            compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)),
            name="toy",
            **more,
        )
        return np.asarray(jax.jit(call)(x))


def drained() -> list[tuple[str, str]]:
    from attest.kernels.pallas.interpreter import drain_violations

    return [(violation.kind, str(violation)) for violation in drain_violations()]


def rows(index: Any) -> pl.BlockSpec:
    return pl.BlockSpec((8, 16), lambda i: (index(i), 0))


def copies(x: Any, y: Any) -> None:
    y[...] = x[...]


X = jnp.arange(32 * 16, dtype=jnp.float32).reshape(32, 16)
OWN = rows(lambda i: i)


@needs_tpu_interpreter
@pytest.mark.parametrize("semantics", ["parallel", "arbitrary"])
def test_a_kernel_without_fault_is_let_be(semantics: str) -> None:
    np.testing.assert_array_equal(run(copies, X, 4, OWN, OWN, semantics), X)
    assert drained() == []


@needs_tpu_interpreter
def test_two_cores_that_write_one_block_race() -> None:
    run(copies, X, 4, OWN, rows(lambda i: 0 * i), "parallel")
    ((kind, sentence),) = drained()
    assert kind == "race"
    assert sentence.startswith("toy: a race between a write of ('hbm'")
    assert drained() == []


@needs_tpu_interpreter
def test_a_sum_over_a_parallel_axis_races() -> None:
    def adds(x: Any, y: Any) -> None:
        y[...] = y[...] + x[...]

    run(adds, X, 4, OWN, rows(lambda i: 0 * i), "parallel")
    assert {kind for kind, _ in drained()} == {"race"}


@needs_tpu_interpreter
def test_a_block_outside_its_array_is_seen_and_the_next_kernel_runs() -> None:
    y = run(copies, X, 4, rows(lambda i: i + 1), OWN, "arbitrary")
    ((kind, sentence),) = drained()
    assert kind == "access"
    assert sentence.startswith('toy: Out-of-bounds block index (4, 0) for input "x"')
    assert np.isnan(y).all()
    test_a_kernel_without_fault_is_let_be("parallel")


@needs_tpu_interpreter
@pytest.mark.parametrize("reads", [True, False])
def test_an_access_outside_a_block_is_seen(reads: bool) -> None:
    def strays(x: Any, y: Any) -> None:
        at = pl.ds(pl.program_id(0) * 3, 4)
        if reads:
            y[0:4, :] = x[at, :]
        else:
            y[at, :] = x[0:4, :]

    run(strays, X, 4, OWN, OWN, "arbitrary")
    ((kind, sentence),) = drained()
    assert kind == "access"
    assert sentence.startswith("toy: Out-of-bounds ")


@needs_tpu_interpreter
def test_what_is_not_initialised_is_nan() -> None:
    def reads_scratch(x: Any, y: Any, scratch: Any) -> None:
        y[...] = x[...] + scratch[...]

    def writes_nothing(x: Any, y: Any) -> None:
        pass

    scratch = [pltpu.VMEM((8, 16), jnp.float32)]
    assert np.isnan(run(reads_scratch, X, 4, OWN, OWN, "parallel", scratch_shapes=scratch)).all()
    assert np.isnan(run(writes_nothing, X, 4, OWN, OWN, "parallel")).all()
    assert drained() == []


@needs_tpu_interpreter
def test_a_block_that_is_left_and_begun_again_is_seen() -> None:
    run(copies, X, 4, OWN, rows(lambda i: i % 2), "arbitrary")
    ((kind, sentence),) = drained()
    assert kind == "access"
    assert sentence.startswith("toy: Revisited block")


@needs_tpu_interpreter
def test_the_seed_decides_the_order_of_parallel_steps() -> None:
    from attest.kernels.pallas.interpreter import interpreted

    def order(seed: int) -> list[float]:
        """What each core finds in a counter of its own, by step."""

        def counts(y: Any, turns: Any) -> None:
            turns[...] = jnp.where(jnp.isnan(turns[...]), 0.0, turns[...] + 1)
            y[...] = turns[...]

        with interpreted(seed):
            call = pl.pallas_call(
                counts,
                jax.ShapeDtypeStruct((64, 16), jnp.float32),
                grid=(8,),
                out_specs=OWN,
                scratch_shapes=[pltpu.VMEM((8, 16), jnp.float32)],
                compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
            )
            return np.asarray(jax.jit(call)())[::8, 0].tolist()

    orders = [order(seed) for seed in (1, 2, 3)]
    assert all(sorted(turns) == [0, 0, 1, 1, 2, 2, 3, 3] for turns in orders)
    assert orders[0] != orders[1] != orders[2]


@needs_tpu_interpreter
def test_a_fault_fails_a_subject_whose_answer_is_right() -> None:
    from attest.conformance.cases.case import Case
    from attest.conformance.running.judge import judge
    from attest.kernels.pallas.interpreter import drain_violations
    from tests.toys import toy, toy_attention

    def careless(query: Any, key: Any, value: Any, **options: Any) -> Any:
        from attest.kernels.pallas.interpreter import interpreted

        out = toy_attention(query, key, value, **options)
        with interpreted(0):
            strange = pl.pallas_call(
                copies,
                jax.ShapeDtypeStruct(X.shape, X.dtype),
                grid=(4,),
                in_specs=[rows(lambda i: i + 1)],
                out_specs=OWN,
                name="careless",
            )(X)
        return out + jnp.where(jnp.isnan(strange[0, 0]), 0, 1).astype(out.dtype)

    subject = toy(careless, semantics=replace(STANDARD, gradients=frozenset()), violations=drain_violations)
    case = Case(q_len=5, kv_len=7, head_dim=4, causal=True, seed=3)
    results = judge(subject, case, ("forward", "purity", "transforms.eager"))
    assert {(result.verdict, result.clauses) for result in results} == {(Verdict.FAIL, ("S19",))}
    assert all(result.message.startswith("careless: Out-of-bounds block index (4, 0)") for result in results)
