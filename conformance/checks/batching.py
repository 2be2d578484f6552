"""Batch dimensions: a call with any number of them gives the same bits as the call with one (S27)."""

from collections.abc import Mapping
from typing import Any

import jax
from numpy.typing import NDArray

from attest.conformance.checks import Check, Finding
from attest.conformance.judging.execute import (
    blaming,
    call_of,
    differentiated,
    forward_and_gradients,
    to_jax,
    to_numpy,
)
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import TRANSFORMED
from attest.conformance.record import Verdict
from attest.conformance.subject import Subject
from attest.reference.leading import BATCHED

Array = NDArray[Any]


def batch_dims(batch: int) -> tuple[int, ...]:
    """Return the dimensions of a split batch: none for one entry, else two, both above 1 if possible."""
    if batch == 1:
        return ()
    first = next((size for size in range(2, batch) if batch % size == 0), 1)
    return first, batch // first


def split(arrays: Mapping[str, Array], dims: tuple[int, ...]) -> dict[str, Array]:
    """Return the arrays of a call with these batch dimensions instead of one."""
    # An offset for each sequence has them, too, where the sequences are those of the batch, not of lengths.
    batched = {*BATCHED, *(() if "cum_seqlens_q" in arrays else ("q_offset",))}
    return {name: _split(array, dims) if name in batched else array for name, array in arrays.items()}


def _split(array: Array, dims: tuple[int, ...]) -> Array:
    own = (1,) * len(dims) if len(array) == 1 else dims
    return array.reshape(*own, *array.shape[1:])


def _run(trial: Trial) -> Finding:
    subject, call, given = trial.subject, call_of(trial.built), trial.built.cotangents
    assert given.lse is not None
    dims = batch_dims(trial.case.batch)
    wanted = differentiated(subject, call)
    function = jax.jit(forward_and_gradients(subject, trial.case.tiling, call.options, wanted))
    d_out, d_lse = (_split(array, dims) for array in (given.out, given.lse))
    with blaming(subject):
        outputs = to_numpy(function(to_jax(split(call.arrays, dims)), d_out, d_lse))
    changed = [name for name, array in trial.outputs.items() if outputs[name].tobytes() != array.tobytes()]
    if changed:
        message = f"batch dimensions {dims} instead of {(trial.case.batch,)} changed {', '.join(changed)}"
        return Finding(Verdict.FAIL, message=message)
    return Finding(Verdict.PASS)


def _applies(subject: Subject) -> str | None:
    return None if subject.limits.batch_dims else "does not declare batch_dims"


CHECKS = (Check("batch_dims", kind=TRANSFORMED, clauses=lambda _trial: ("S27",), run=_run, applies=_applies),)
