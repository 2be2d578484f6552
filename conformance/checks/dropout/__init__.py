"""Dropout by the subject's own generator: calls show the kept weights, which are then tested (S12).

One-hot values show which weights the forward pass keeps, and one-hot cotangents show those of the backward
pass. Both must be the same weights, kept at the declared rate and independently of each other. Under these
weights the oracle judges out, lse and all gradients.
"""

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from attest.conformance.cases.case import Case
from attest.conformance.checks import Check, Finding, held_to_oracle
from attest.conformance.checks.dropout.rates import AXES, improbable
from attest.conformance.drawing.strategies import without
from attest.conformance.judging.kept_weights import Kept, kept_backward, kept_forward, undropped
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import TRANSFORMED
from attest.conformance.record import Verdict
from attest.conformance.subject import Subject

# What a case of other sizes may contradict.
_SIZED = frozenset({"packed", "padded", "q_offset"})
_USUAL_RATE = 0.25


@cache
def numbers() -> dict[str, Any]:
    """Return the numbers of dropout.toml."""
    return tomllib.loads(Path(__file__).with_name("dropout.toml").read_text())


def with_dropout(case: Case, subject: Subject) -> Case:
    """Return a case with dropout and enough weights to judge their rate. Raises ValueError if none is."""
    least, limits = numbers(), subject.limits
    tokens = -(-min(least["tokens"], limits.longest) // limits.length_multiple) * limits.length_multiple
    case = without(case, _SIZED & case.features)
    if case.q_heads < least["heads"]:
        case = replace(case, q_heads=least["heads"], kv_heads=least["heads"])
    return replace(
        case,
        batch=max(case.batch, least["batch"]),
        q_len=max(case.q_len, tokens),
        kv_len=max(case.kv_len, tokens),
        dropout=case.dropout or _USUAL_RATE,
        poison=False,
    )


def _run(trial: Trial) -> Finding:
    subject = trial.subject
    try:
        case = with_dropout(trial.case, subject)
    except ValueError as error:
        return Finding(Verdict.INCONCLUSIVE, message=f"the case takes no dropout: {error}")
    first = Trial(subject, case)
    reason = subject.why_not(case) or first.out_of_range
    if reason is not None:
        return Finding(Verdict.INCONCLUSIVE, message=f"the subject does not take the case: {reason}")
    if first.unspecified or first.overflows:
        return Finding(Verdict.INCONCLUSIVE, message="the results of the case are not defined")
    finding = held_to_oracle(first, first.outputs, sorted(first.outputs))
    wrong = [*_backward(first), *_statistics(first)]
    if not wrong:
        return finding
    message = "; ".join(filter(None, (*wrong, finding.message)))
    return Finding(Verdict.FAIL, finding.measurements, message)


def _kept(trial: Trial) -> Kept:
    kept = trial.problem.dropout_keep
    assert kept is not None
    return kept


def _backward(trial: Trial) -> list[str]:
    """Return what the backward pass drops otherwise than the forward pass, in a sentence."""
    if "value" not in trial.subject.semantics.gradients:
        return []
    kept = _kept(trial)
    differ = kept_backward(trial.subject, trial.built, trial.case.tiling) != kept
    if not differ.any():
        return []
    places = ", ".join(f"{name} {at}" for name, at in zip(AXES[1:], np.argwhere(differ)[0], strict=True))
    return [f"the backward pass keeps other weights than the forward pass in {differ.sum()} places: {places}"]


def _statistics(trial: Trial) -> list[str]:
    """Return the least probable count of the kept weights of several seeds, in a sentence."""
    chosen, subject, tiling = numbers(), trial.subject, trial.case.tiling
    seed, bits = trial.built.problem.dropout_seed or 0, subject.limits.seed_bits
    masks = [_kept(trial)]
    for other in dict.fromkeys((seed + more) % 2**bits for more in range(1, chosen["seeds"])):
        problem = replace(trial.built.problem, dropout_seed=other)
        masks.append(kept_forward(subject, replace(trial.built, problem=problem), tiling, gradients=False))
    kept = np.stack(masks)
    seen = np.broadcast_to(undropped(subject, trial.built) > 0, kept.shape)
    counts = improbable(kept, seen, trial.case.dropout, chosen["false_alarm"])
    return [str(counts[0])] if counts else []


def _applies(subject: Subject) -> str | None:
    if "dropout" not in subject.features:
        return "does not declare dropout"
    own = subject.semantics.dropout == "own_generator"
    return None if own else "declares a generator, by which the oracle drops the same weights"


CHECKS = (Check("dropout", kind=TRANSFORMED, clauses=lambda _trial: ("S12",), run=_run, applies=_applies),)
