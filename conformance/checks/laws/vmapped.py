"""The law of vmap: a map over one argument equals a loop over it. Each case maps some of its arguments."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.conformance.cases.build import Built
from attest.conformance.checks.laws.calls import mapped_arguments
from attest.conformance.checks.laws.law import NAMES, Array, Called, Equation, Outputs, Rewrite, output_of
from attest.conformance.judging.execute import (
    blaming,
    call_of,
    differentiated,
    forward_and_gradients,
    to_numpy,
)
from attest.conformance.judging.trial import Trial

_COTANGENTS = "cotangents"
_LENGTHS = ("cum_seqlens_q", "cum_seqlens_k")


def vmapped(trial: Trial) -> Rewrite:
    """Map over some arguments in turn; the others are the same for both entries."""
    built = trial.built
    other = Trial(trial.subject, replace(trial.case, seed=trial.case.seed ^ 1)).built
    calls, equations = [Called(built)], list[Equation]()
    for name in arguments(trial):
        second = _with(built, other, name)
        run = _mapped(trial, name, built, second)
        looped = len(calls)
        calls.append(Called(second))
        calls += [
            Called(entry, run=partial(_entry, run, number)) for number, entry in enumerate((built, second))
        ]
        equations += [
            Equation(output, output_of(output, loop), output_of(output, vmap), where=f" over {name}")
            for output in NAMES
            for loop, vmap in ((0, looped + 1), (looped, looped + 2))
        ]
    return Rewrite(tuple(calls), tuple(equations))


def arguments(trial: Trial) -> tuple[str, ...]:
    """Return the arguments to map over: arrays of the call, or all cotangents; the case's seed chooses."""
    names = [*call_of(trial.built).arrays, _COTANGENTS]
    chosen = np.random.default_rng(trial.case.seed).permutation(len(names))[: mapped_arguments()]
    return tuple(names[number] for number in chosen)


def _entry(run: Any, number: int) -> Outputs:
    return {name: array[number] for name, array in run().items()}


def _with(built: Built, other: Built, name: str) -> Built:
    """Return the call with one argument of another one, or with other lengths, offsets or positions."""
    if name == _COTANGENTS:
        return replace(built, cotangents=other.cotangents)
    mine, theirs = getattr(built.problem, name), getattr(other.problem, name)
    if name in _LENGTHS:
        theirs = np.concatenate([[0], np.cumsum(np.diff(mine)[::-1])]).astype(mine.dtype)
    elif np.array_equal(mine, theirs):
        theirs = np.flip(mine, axis=-1)
    integers = other.integer_mask if name == "attention_mask" else built.integer_mask
    return replace(built, problem=replace(built.problem, **{name: theirs}), integer_mask=integers)


def _mapped(trial: Trial, name: str, first: Built, second: Built) -> Any:
    """Return the function that runs both entries in one map, once, and returns the stacked outputs."""
    call = call_of(first)
    wanted = differentiated(trial.subject, call)
    function = forward_and_gradients(trial.subject, trial.case.tiling, call.options, wanted)
    over = 0 if name == _COTANGENTS else None
    axes = {array: 0 if array == name else None for array in call.arrays}

    @cache
    def run() -> Outputs:
        other = call_of(second).arrays
        arrays = {key: _stack(array, other[key], axes[key]) for key, array in call.arrays.items()}
        d_out, d_lse = (
            _stack(getattr(first.cotangents, of), getattr(second.cotangents, of), over)
            for of in ("out", "lse")
        )
        mapped = jax.jit(jax.vmap(function, in_axes=(axes, over, over)))
        with blaming(trial.subject):
            return to_numpy(mapped(arrays, d_out, d_lse))

    return run


def _stack(first: Array, second: Array, axis: int | None) -> Any:
    return jnp.asarray(first if axis is None else np.stack([first, second]))
