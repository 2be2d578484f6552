"""Laws of calls: block sizes, repeated calls, and what was in memory before."""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from attest.conformance.checks.laws.law import Called, Rewrite, same
from attest.conformance.judging.trial import Trial
from attest.conformance.subject import Subject

_NUMBERS = Path(__file__).parent / "laws.toml"


@cache
def _numbers() -> dict[str, float]:
    return tomllib.loads(_NUMBERS.read_text())


def repeat_seconds() -> float:
    """Return the seconds after which a law that compares bits makes no further call."""
    return _numbers()["repeat_seconds"]


def difference_reach() -> float:
    """Return how far a step of a directional difference moves the logits of a row apart, at most."""
    return _numbers()["difference_reach"]


def mapped_arguments() -> int:
    """Return over how many arguments of a case the law of vmap maps."""
    return int(_numbers()["mapped_arguments"])


def repeats(trial: Trial) -> Rewrite:
    """Call again, many times."""
    return Rewrite((Called(trial.built),) * int(_numbers()["repeats"]), ())


def other_call(trial: Trial) -> Rewrite:
    """Call with other values in between, of the same shapes: the first call's results come back."""
    other = Trial(trial.subject, replace(trial.case, seed=trial.case.seed ^ 1)).built
    first = Called(trial.built)
    return Rewrite((first, Called(other), first), same(calls=(2,)))


def nan_in_memory(trial: Trial) -> Rewrite:
    """Fill memory of the sizes of all arrays with NaN and free it, before the second call."""
    arrays = [trial.built.problem.query, trial.built.problem.key, trial.built.problem.value]
    sizes = {array.nbytes for array in (*arrays, np.asarray(trial.built.cotangents.lse))}

    def fill() -> None:
        # Allocators give a buffer that was just freed to the next request of its size.
        filled = [jnp.full(max(size // 4, 1), jnp.nan, jnp.float32) for size in sizes for _ in range(4)]
        jax.block_until_ready(filled)

    return Rewrite((Called(trial.built), Called(trial.built, before=fill)), ())


def tilings(trial: Trial) -> Rewrite:
    """Call with each other tiling that the subject declares."""
    count = len(trial.subject.tilings)
    own = trial.case.tiling % count
    others = [number for number in range(count) if number != own]
    calls = (Called(trial.built), *(Called(trial.built, tiling=number) for number in others))
    return Rewrite(calls, same(calls=range(1, len(calls))))


def needs_tilings(subject: Subject) -> str | None:
    """Return why a subject has no other tilings to compare; None if it has."""
    return None if len(subject.tilings) > 1 else "declares one tiling"


def needs_lse(subject: Subject) -> str | None:
    """Return why a subject has no lse to merge by; None if it has."""
    return None if subject.returns_lse else "does not return lse"


def needs_gradients(*names: str) -> Callable[[Subject], str | None]:
    """Return the function that says why a subject lacks gradients that a law compares; None if it has all."""

    def why_not(subject: Subject) -> str | None:
        missing = sorted(set(names) - subject.semantics.gradients)
        return f"declares no gradient of {', '.join(missing)}" if missing else None

    return why_not
