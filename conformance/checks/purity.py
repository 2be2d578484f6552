"""Whether a call leaves its inputs as they were and returns plain arrays (S19)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from conformance.checks import Check, Finding
from conformance.execute import SubjectError, blaming, call_of, invoke
from conformance.record import Verdict
from conformance.trial import Trial


def _run(trial: Trial) -> Finding:
    call = call_of(trial.built)
    inputs = {name: jnp.array(array, copy=True) for name, array in call.arrays.items()}
    with blaming(trial.subject):
        out, lse = jax.block_until_ready(invoke(trial.subject, trial.case.tiling, inputs, dict(call.options)))
    for name, array in (("out", out), ("lse", lse)):
        if isinstance(array, Tracer):
            raise SubjectError(f"returned {name} as a tracer from an eager call")
    changed = [
        name
        for name, array in call.arrays.items()
        if np.asarray(inputs[name]).tobytes() != np.ascontiguousarray(array).tobytes()
    ]
    if changed:
        return Finding(Verdict.FAIL, message=f"the call modified its input {', '.join(changed)}")
    return Finding(Verdict.PASS)


CHECKS = (Check("purity", kind="repeated", clauses=lambda _trial: ("S19",), run=_run),)
