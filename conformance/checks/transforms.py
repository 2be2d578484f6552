"""Transforms: eager, jit, vmap, grad, remat and scan give the oracle's answer, compiled once (S22)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from attest.conformance.cases.build import Built
from attest.conformance.checks import Check, Finding, held_to_oracle
from attest.conformance.judging.execute import (
    blaming,
    call_of,
    differentiated,
    forward_and_gradients,
    invoke,
    to_jax,
    to_numpy,
)
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import TRANSFORMED
from attest.conformance.record import Verdict

Outputs = dict[str, Any]

# What JAX reports to its monitoring listeners for each compilation.
_COMPILED = "/jax/core/compile/backend_compile_duration"


def _function(
    trial: Trial, transform: Callable[[Any], Any] = lambda function: function
) -> Callable[..., Any]:
    call = call_of(trial.built)
    wanted = differentiated(trial.subject, call)
    return forward_and_gradients(trial.subject, trial.case.tiling, call.options, wanted, transform)


def _arguments(built: Built) -> tuple[dict[str, Any], Any, Any]:
    d_lse = built.cotangents.lse
    return to_jax(call_of(built).arrays), jnp.asarray(built.cotangents.out), jnp.asarray(d_lse)


def _sibling(trial: Trial) -> Trial:
    """Return the same recipe with another seed: other values, the same static options and lengths."""
    return Trial(trial.subject, replace(trial.case, seed=trial.case.seed ^ 1))


def _eager(trial: Trial) -> Outputs:
    return _function(trial)(*_arguments(trial.built))


def _remat(trial: Trial) -> Outputs:
    return jax.jit(_function(trial, jax.checkpoint))(*_arguments(trial.built))


def _stacked(trial: Trial) -> tuple[Any, ...]:
    pair = (_arguments(trial.built), _arguments(_sibling(trial).built))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *pair)


def _vmap(trial: Trial) -> Outputs:
    """Map over a stack of the case and its sibling; a kernel that mixes the two would fail."""
    return _first(jax.jit(jax.vmap(_function(trial)))(*_stacked(trial)))


def _scan(trial: Trial) -> Outputs:
    function = _function(trial)

    def step(carry: None, arguments: tuple[Any, ...]) -> tuple[None, Outputs]:
        return carry, function(*arguments)

    return _first(jax.jit(lambda stack: jax.lax.scan(step, None, stack)[1])(_stacked(trial)))


def _first(outputs: Mapping[str, Any]) -> Outputs:
    return {name: array[0] for name, array in outputs.items()}


def _grad_under_jit(trial: Trial) -> Outputs:
    """Return the gradients of a scalar loss that uses both cotangents."""
    call = call_of(trial.built)
    wanted = differentiated(trial.subject, call)
    arrays, d_out, d_lse = _arguments(trial.built)

    def loss(varied: Mapping[str, Any]) -> Any:
        out, lse = invoke(trial.subject, trial.case.tiling, {**arrays, **varied}, dict(call.options))
        total = (out * d_out).astype(jnp.float32).sum()
        if lse is None:
            return total
        finite = jnp.isfinite(lse)
        return total + jnp.where(finite, jnp.where(finite, lse, 0.0) * d_lse.astype(lse.dtype), 0.0).sum()

    gradients = jax.jit(jax.grad(loss))({name: arrays[name] for name in wanted})
    return {f"d{name}": gradient for name, gradient in gradients.items()}


TRANSFORMS: dict[str, Callable[[Trial], Outputs]] = {
    "eager": _eager,
    "grad_under_jit": _grad_under_jit,
    "remat": _remat,
    "vmap": _vmap,
    "scan": _scan,
}


def _check(name: str, transformed: Callable[[Trial], Outputs]) -> Check:
    def run(trial: Trial) -> Finding:
        with blaming(trial.subject):
            outputs = to_numpy(transformed(trial))
        return held_to_oracle(trial, outputs, sorted(outputs))

    return Check(f"transforms.{name}", kind=TRANSFORMED, clauses=lambda _trial: ("S22",), run=run)


_compilations: list[str] = []


def _note(event: str, duration_secs: float, **_details: str | int) -> None:
    if event == _COMPILED:
        _compilations.append(event)


jax.monitoring.register_event_duration_secs_listener(_note)


_REMEDY = "wrap the kernel in jax.jit, with what decides its program as static arguments"


def _run_retrace(trial: Trial) -> Finding:
    """Run two calls, forward and backward: the first may compile any number of times, the second may not."""
    with blaming(trial.subject):
        jax.block_until_ready(_eager(trial))
        sibling = _arguments(_sibling(trial).built)
        before = len(_compilations)
        jax.block_until_ready(_function(trial)(*sibling))
    again = len(_compilations) - before
    if again:
        programs = "1 program" if again == 1 else f"{again} programs"
        message = f"a second call with the same shapes compiled {programs} again"
        return Finding(Verdict.FAIL, message=f"{message}\n{_REMEDY}")
    return Finding(Verdict.PASS)


CHECKS = (
    *(_check(name, transformed) for name, transformed in TRANSFORMS.items()),
    Check("transforms.no_retrace", kind=TRANSFORMED, clauses=lambda _trial: ("S22",), run=_run_retrace),
)
