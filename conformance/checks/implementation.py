"""The choice of an implementation: the trace shows that the intended one ran (S20)."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from attest.conformance.checks import Check, Finding
from attest.conformance.judging.execute import blaming, call_of, differentiated, invoke, to_jax
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import DRAWN
from attest.conformance.record import Verdict
from attest.conformance.subject import Subject

# Primitives that only programs of this implementation have. A program without any of them is XLA's.
MARKS: Mapping[str, str] = {
    "triton_ptx_call": "triton",
    "triton_kernel_call": "triton",  # by jax-triton
    "pure_callback": "triton",  # in Triton's interpreter
}
# The module whose callbacks interpret TPU kernels.
_TPU_INTERPRETER = "attest.kernels.pallas.interpreter"
# The primitives of every Pallas kernel, on any device; their parameters name the device.
LAUNCHES = ("pallas_call", "mpmd_map")
UNMARKED = "xla"


def implementations(jaxpr: Jaxpr) -> frozenset[str]:
    """Return the implementations that a program runs, by their marks."""
    marked = {mark for equation in _equations(jaxpr) if (mark := _mark(equation)) is not None}
    return frozenset(marked or {UNMARKED})


def _mark(equation: JaxprEqn) -> str | None:
    """Return the implementation that an equation belongs to; None if any program may have it."""
    name = equation.primitive.name
    if name == "pure_callback" and _called_module(equation.params) == _TPU_INTERPRETER:
        return "pallas_tpu"
    if name not in LAUNCHES:
        return MARKS.get(name)
    return "mosaic_gpu" if _for_gpus(equation.params) else "pallas_tpu"


def _called_module(params: Mapping[str, Any]) -> str:
    """Return the module of the function that a program calls back."""
    called: Any = getattr(params["callback"], "callback_func", None)
    return getattr(getattr(called, "func", called), "__module__", "")


def _for_gpus(params: Mapping[str, Any]) -> bool:
    """Return whether Mosaic GPU compiles a launch: its options and meshes then have that compiler's types."""
    # Imported only for a program with such a launch, so that listing the checks does not import Pallas.
    from jax.experimental.pallas import mosaic_gpu

    own: Any = (mosaic_gpu.CompilerParams, mosaic_gpu.Mesh)
    return any(isinstance(x, own) for x in (params["compiler_params"], *params.get("meshes", ())))


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params):
            if isinstance(parameter, Jaxpr):
                yield from _equations(parameter)


def passes(subject: Subject, trial: Trial) -> dict[str, Jaxpr]:
    """Trace the programs of the two passes of a subject, only the forward one if there are no gradients.

    Raises SubjectError.
    """
    call = call_of(trial.built)
    arrays = to_jax(call.arrays)
    varied = {name: arrays.pop(name) for name in differentiated(subject, call)}
    programs: dict[str, Jaxpr] = {}

    def forward(varied: Mapping[str, Any]) -> Any:
        return invoke(subject, trial.case.tiling, {**arrays, **varied}, dict(call.options))

    def both(varied: Mapping[str, Any]) -> Any:
        outputs, pull = jax.vjp(forward, varied)
        if varied:
            programs["backward"] = jax.make_jaxpr(pull)(jax.tree.map(jnp.zeros_like, outputs))
        return outputs

    with blaming(subject):
        traced = jax.make_jaxpr(both)(varied)
    return {"forward": traced, **programs}


def _run(trial: Trial) -> Finding:
    assert trial.subject.implementation is not None
    case = trial.case
    if 0 in (case.q_len, case.kv_len):
        return Finding(Verdict.INCONCLUSIVE, message="the case has no pair of a query and a key")
    named = trial.subject.implementation(case)
    meant = frozenset({named}) if isinstance(named, str) else named
    others = [
        f"{' and '.join(sorted(ran))} ran the {name} pass"
        for name, program in passes(trial.subject, trial).items()
        if len(ran := implementations(program)) != 1 or not ran <= meant
    ]
    if others:
        should = " or ".join(sorted(meant))
        return Finding(Verdict.FAIL, message=f"{should} should have run, but {', '.join(others)}")
    return Finding(Verdict.PASS)


def _applies(subject: Subject) -> str | None:
    return "names no implementation" if subject.implementation is None else None


CHECKS = (Check("implementation", kind=DRAWN, clauses=lambda _trial: ("S20",), run=_run, applies=_applies),)
