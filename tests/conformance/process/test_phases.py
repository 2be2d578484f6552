"""A worker says what it is doing, in a file that outlives it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from attest.conformance.cases.case import Case
from attest.conformance.process import phases
from attest.conformance.process.phases import checking, notice_compiling, phase, read_phase, reported
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge
from attest.conformance.subject import Subject, Tiling, default_numerics
from attest.reference.numerics import Numerics
from tests import toys


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "phase"
    with reported(path):
        yield path


def test_a_file_that_is_not_there_is_of_a_process_that_has_not_begun(tmp_path):
    assert read_phase(tmp_path / "nothing") == ("loading", "")


def test_what_surrounds_a_phase_goes_on_after_it(path):
    seen = []
    with checking("forward"):
        seen.append(read_phase(path))
        with phase("running"):
            seen.append(read_phase(path))
        seen.append(read_phase(path))
    assert seen == [("drawing", "forward"), ("running", "forward"), ("drawing", "forward")]


def test_nothing_is_written_when_nobody_asks(tmp_path):
    with phase("running"):
        assert phases._here.descriptor is None


def test_each_part_of_judging_a_case_is_its_phase(path):
    """Each place is asked from within: the declaration, the call, the lowering, the run and the backward."""
    seen: dict[str, tuple[str, str]] = {}

    def noted(place: str) -> None:
        seen[place] = read_phase(path)

    marked = Primitive("marked")
    marked.def_abstract_eval(lambda array: array)

    def lowering(context: Any, array: Any) -> Any:
        noted("lowering")
        return [array]

    mlir.register_lowering(marked, lowering)

    @jax.custom_vjp
    def watched(array: Any) -> Any:
        def at_run_time(value: Any) -> Any:
            noted("the run")
            return value

        return jax.pure_callback(at_run_time, jax.ShapeDtypeStruct(array.shape, array.dtype), array)

    def backward(_residual: None, cotangent: Any) -> tuple[Any]:
        noted("the backward")
        return (cotangent,)

    watched.defvjp(lambda array: (watched(array), None), backward)

    def call(query: Any, key: Any, value: Any) -> Any:
        noted("the call")
        value = value + 0 * marked.bind(jax.lax.stop_gradient(jnp.ones_like(value)))
        return watched(toys.right.call(query, key, value))

    def numerics(dtype: str, tiling: Tiling) -> Numerics:
        noted("the declaration")
        return default_numerics(dtype, tiling)

    notice_compiling()
    try:
        (result,) = judge(
            Subject("watched", call, numerics=numerics), Case(q_len=2, kv_len=2), ("gradients",)
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(phases._note)
    assert result.verdict is Verdict.PASS, result.message
    assert seen == {
        "the call": ("running", "gradients"),
        "the backward": ("gradients", "gradients"),
        "lowering": ("compiling", "gradients"),
        "the run": ("running", "gradients"),
        "the declaration": ("drawing", "gradients"),
    }
