"""Sharding: a call whose batch and heads are split over devices gives the results of one device (S21).

The batch entries and the heads of a case are divided among the devices of this process. The results must
agree with the oracle. The same pairs must be seen and kept as on one device, which one-hot values show. The
compiled program may gather no array: devices exchange only sums.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from attest.conformance.cases.build import Built
from attest.conformance.cases.case import Case
from attest.conformance.checks import Check, Finding, held_to_oracle
from attest.conformance.checks.positions import kept, pattern_keys
from attest.conformance.judging.execute import (
    blaming,
    call_of,
    differentiated,
    forward_and_gradients,
    to_numpy,
)
from attest.conformance.judging.kept_weights import showing
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import SHARDED
from attest.conformance.record import Verdict
from attest.conformance.shards import shards
from attest.conformance.subject import Subject

_MESHES: Mapping[str, str] = {"explicit": "Explicit", "automatic": "Auto"}
# What the axes of each array are: the batch, query or key heads, or whole on every device.
_AXES: Mapping[str, str] = {
    "query": "b.h.",
    "key": "b.k.",
    "value": "b.k.",
    "attention_mask": "bh..",
    "bias": "bh..",
    "q_segment_ids": "b.",
    "kv_segment_ids": "b.",
    "q_positions": "b.",
    "kv_positions": "b.",
    "q_offset": "b",
    "out": "b.h.",
    "lse": "bh.",
}
_GATHERS = re.compile(r"\b(all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def _spec(case: Case, parts: tuple[int, int], name: str, array: NDArray[Any]) -> PartitionSpec:
    """Return how an array is sharded; an axis of one entry, or of too few for the devices, is whole."""
    sizes = {"b": case.batch, "h": case.q_heads, "k": case.kv_heads}
    over = {"b": ("batch", parts[0]), "h": ("heads", parts[1]), "k": ("heads", parts[1])}
    axes = "h." if name == "softmax_aux" and array.ndim == 2 else _AXES.get(name, "")
    entries: list[str | None] = []
    for kind, size in zip(axes, array.shape, strict=False):
        axis, count = over.get(kind, (None, 1))
        entries.append(axis if size == sizes.get(kind) and size % count == 0 else None)
    return PartitionSpec(*entries)


def _run_sharded(trial: Trial, mesh: Any, built: Built, gradients: bool) -> tuple[dict[str, Any], str]:
    """Return the outputs of a call on a mesh, and its compiled program. Raises SubjectError."""
    subject, call = trial.subject, call_of(built)
    wanted = differentiated(subject, call) if gradients else ()
    parts = mesh.shape["batch"], mesh.shape["heads"]
    function = forward_and_gradients(subject, trial.case.tiling, call.options, wanted)
    given = {**call.arrays, "out": built.cotangents.out, "lse": built.cotangents.lse}
    places = {
        name: NamedSharding(mesh, _spec(trial.case, parts, name, np.asarray(array)))
        for name, array in given.items()
    }

    def run(arrays: Mapping[str, Any], d_out: Any, d_lse: Any) -> dict[str, Any]:
        outputs = function(arrays, d_out, d_lse)
        # A gradient is where its array is. Otherwise XLA may place it so that it must be gathered.
        return {name: put(array, places[name.removeprefix("d")]) for name, array in outputs.items()}

    automatic = AxisType.Auto in mesh.axis_types
    put: Any = jax.lax.with_sharding_constraint if automatic else lambda array, _: array
    with jax.set_mesh(mesh), blaming(subject):
        arrays = {name: jax.device_put(np.asarray(array), places[name]) for name, array in given.items()}
        d_out, d_lse = arrays.pop("out"), arrays.pop("lse")
        program = jax.jit(run).lower(arrays, d_out, d_lse).compile()
        return to_numpy(program(arrays, d_out, d_lse)), program.as_text() or ""


def _run(trial: Trial, kind: str) -> Finding:
    subject = trial.subject
    devices = jax.local_devices()
    parts = shards(trial.case.batch, trial.case.q_heads, len(devices))
    if parts == (1, 1):
        return Finding(Verdict.INCONCLUSIVE, message="no number of devices divides the batch or the heads")
    types: Any = (getattr(AxisType, _MESHES[kind]),) * 2
    mesh = jax.make_mesh(parts, ("batch", "heads"), axis_types=types, devices=devices[: math.prod(parts)])
    where = f"{parts[0]} x {parts[1]} devices"

    outputs, program = _run_sharded(trial, mesh, trial.built, gradients=True)
    finding = held_to_oracle(trial, outputs, sorted(outputs))
    if finding.verdict is Verdict.FAIL:
        return Finding(Verdict.FAIL, finding.measurements, f"on {where} {finding.message}")
    gathers = sorted(set(_GATHERS.findall(program)))
    if gathers:
        return Finding(Verdict.FAIL, finding.measurements, f"on {where} the program has {', '.join(gathers)}")
    same = sorted(subject.sharding.bits & outputs.keys())
    changed = [name for name in same if outputs[name].tobytes() != trial.outputs[name].tobytes()]
    if changed:
        return Finding(
            Verdict.FAIL, finding.measurements, f"{where} changed the bits of {', '.join(changed)}"
        )
    for keys in pattern_keys(trial.built.problem):
        shown, _ = _run_sharded(trial, mesh, showing(trial.built, keys), gradients=False)
        seen = shown["out"][..., : keys.stop - keys.start].astype(np.float64) != 0
        if not np.array_equal(seen, kept(trial, keys)):
            message = f"on {where} other pairs are seen and kept than on one device"
            return Finding(Verdict.FAIL, finding.measurements, message)
    return Finding(Verdict.PASS, finding.measurements)


def _clauses(trial: Trial) -> tuple[str, ...]:
    shared = ("S29",) if trial.case.dropout_shared else ()
    return ("S21", "S12", *shared) if trial.case.dropout else ("S21",)


def _applies(subject: Subject, kind: str) -> str | None:
    if kind not in subject.sharding.meshes:
        return f"does not declare {kind} meshes"
    if not hasattr(jax, "shard_map"):
        return f"jax {jax.__version__} has no jax.shard_map"
    return None if jax.local_device_count() > 1 else "needs several devices, and JAX has one"


def _check(kind: str) -> Check:
    run: Callable[[Trial], Finding] = partial(_run, kind=kind)
    applies: Callable[[Subject], str | None] = partial(_applies, kind=kind)
    return Check(f"sharding.{kind}", kind=SHARDED, clauses=_clauses, run=run, applies=applies)


CHECKS = tuple(_check(kind) for kind in _MESHES)
