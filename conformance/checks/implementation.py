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

# What no program has unless this implementation is in it; one that has none of them is XLA's alone.
MARKS: Mapping[str, str] = {
    "triton_kernel_call": "triton",
    "pure_callback": "triton",  # in Triton's interpreter
}
# What every kernel of Pallas is, on any device; its parameters say for which.
LAUNCHES = ("pallas_call", "mpmd_map")
UNMARKED = "xla"


def implementations(jaxpr: Jaxpr) -> frozenset[str]:
    """The implementations that a program runs, by their marks."""
    marked = {mark for equation in _equations(jaxpr) if (mark := _mark(equation)) is not None}
    return frozenset(marked or {UNMARKED})


def _mark(equation: JaxprEqn) -> str | None:
    """The implementation that an equation belongs to, None where any program may have it."""
    name = equation.primitive.name
    if name not in LAUNCHES:
        return MARKS.get(name)
    return "mosaic_gpu" if _for_gpus(equation.params) else "pallas_tpu"


def _for_gpus(params: Mapping[str, Any]) -> bool:
    """Whether Mosaic GPU is to compile a launch: the types of its options and meshes are that compiler's."""
    # Not before a program has such a launch, so that listing the checks imports no Pallas.
    from jax.experimental.pallas import mosaic_gpu

    own: Any = (mosaic_gpu.CompilerParams, mosaic_gpu.Mesh)
    return any(isinstance(x, own) for x in (params["compiler_params"], *params.get("meshes", ())))


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params):
            if isinstance(parameter, Jaxpr):
                yield from _equations(parameter)


def _passes(trial: Trial) -> dict[str, Jaxpr]:
    """The programs of the two passes, traced and not run; the forward alone where there are no gradients."""
    subject, call = trial.subject, call_of(trial.built)
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
        return Finding(Verdict.INCONCLUSIVE, message="no pair of a query and a key: nothing need be launched")
    meant = trial.subject.implementation(case)
    strangers = [
        f"{' and '.join(sorted(ran))} ran its {name}"
        for name, program in _passes(trial).items()
        if (ran := implementations(program)) != frozenset({meant})
    ]
    if strangers:
        return Finding(Verdict.FAIL, message=f"{meant} was meant to run, and {', '.join(strangers)}")
    return Finding(Verdict.PASS)


def _applies(subject: Subject) -> str | None:
    return "names no implementation" if subject.implementation is None else None


CHECKS = (Check("implementation", kind=DRAWN, clauses=lambda _trial: ("S20",), run=_run, applies=_applies),)
