"""The check of which implementation ran sees through transforms, in both passes, and judges `auto` itself."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from conformance.case import Case
from conformance.judge import judge
from conformance.plan import load_profile, profile_names, tasks
from conformance.record import Result, Verdict
from conformance.subject import Subject, find
from kernels import choose
from tests.conformance.toy import toy, toy_attention

CASE = Case(q_len=5, kv_len=5, head_dim=4, seed=3)


def verdict(subject: Subject, case: Case = CASE) -> Result:
    (result,) = judge(subject, case, ("implementation",))
    return result


def called_back(x: Any) -> Any:
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def in_pallas(x: Any) -> Any:
    def copy(source: Any, target: Any) -> None:
        target[...] = source[...]

    return pl.pallas_call(copy, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def through(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[..., Any]:
    """The toy, its output and its cotangent each handed through something, deep in a program."""

    @jax.custom_vjp
    def passed(x: Any) -> Any:
        return deep(forward)(x)

    passed.defvjp(lambda x: (passed(x), None), lambda _, cotangent: (deep(backward)(cotangent),))
    return lambda *arrays, **options: passed(toy_attention(*arrays, **options))


def deep(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @jax.jit
    def run(x: Any) -> Any:
        def turn(_: Any, x: Any) -> Any:
            return jax.lax.cond(x.sum() > 0, function, lambda x: x, x)

        return jax.checkpoint(lambda x: jax.lax.fori_loop(0, 2, turn, x))(x)

    return run


def plain(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("forward", "backward", "meant", "words"),
    [
        (plain, plain, "xla", None),
        (called_back, called_back, "triton", None),
        (in_pallas, in_pallas, "pallas_tpu", None),
        (plain, plain, "triton", "triton was meant to run, and xla ran its forward, xla ran its backward"),
        (called_back, called_back, "xla", "xla was meant to run, and triton ran its forward"),
        (in_pallas, in_pallas, "triton", "triton was meant to run, and pallas_tpu ran its forward"),
        (called_back, plain, "triton", "triton was meant to run, and xla ran its backward"),
        (plain, called_back, "xla", "xla was meant to run, and triton ran its backward"),
    ],
)
def test_another_implementation_than_was_meant_fails(
    forward: Callable[[Any], Any], backward: Callable[[Any], Any], meant: str, words: str | None
) -> None:
    result = verdict(toy(through(forward, backward), implementation=lambda _case: meant))
    assert result.verdict is (Verdict.PASS if words is None else Verdict.FAIL), result.message
    assert result.message.startswith(words or "")


def test_two_in_one_program_are_both_named() -> None:
    both = through(lambda x: in_pallas(called_back(x)), plain)
    result = verdict(toy(both, implementation=lambda _case: "triton"))
    assert result.verdict is Verdict.FAIL
    assert "pallas_tpu and triton ran its forward" in result.message


def test_what_is_meant_follows_the_case() -> None:
    subject = toy(implementation=lambda case: "triton" if case.causal else "xla")
    assert verdict(subject).verdict is Verdict.PASS
    assert verdict(subject, Case(q_len=5, kv_len=5, causal=True)).verdict is Verdict.FAIL


@pytest.fixture(params=["gpu", "tpu"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """JAX and the Triton kernels believe in a device that is not here: calls are traced for it, no more."""
    backend: str = request.param
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    if backend == "gpu":
        pytest.importorskip("jax_triton")
        for name in ("kernels.triton.flash_attention", "kernels.triton.launch"):
            monkeypatch.setattr(importlib.import_module(name), "target_device", lambda: "sm_90")
    return backend


FEATURES = [
    {},
    {"causal": True, "soft_cap": 5.0},
    {"bias": "bhq", "dropout": 0.5, "sinks": 2, "lengths": ((2, 3), (2, 1))},
    {"mask": "1h", "segments": 2, "normalized": False},
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_our_kernels_are_known_by_their_launches(features: dict[str, Any], elsewhere: str) -> None:
    """On a GPU by the primitive of jax-triton, on a TPU by that of Pallas; in both passes."""
    subject = replace(find("auto"), implementation={"gpu": triton, "tpu": pallas_tpu}[elsewhere])
    for meant, expected in ((subject, Verdict.PASS), (replace(subject, implementation=xla), Verdict.FAIL)):
        result = verdict(meant, replace(CASE, **features))
        assert result.verdict is expected, result.message


def test_what_the_kernels_do_not_take_runs_in_xla(elsewhere: str) -> None:
    """A head dim of 257, by the choice; the subject is told to take it."""
    subject = replace(find("auto"), head_dims=(1, 300), implementation=xla)
    result = verdict(subject, replace(CASE, head_dim=257))
    assert result.verdict is Verdict.PASS, result.message


def triton(_case: Case) -> str:
    return "triton"


def pallas_tpu(_case: Case) -> str:
    return "pallas_tpu"


def xla(_case: Case) -> str:
    return "xla"


def test_a_call_without_pairs_cannot_tell() -> None:
    result = verdict(toy(implementation=lambda _case: "triton"), Case(q_len=2, kv_len=0))
    assert result.verdict is Verdict.MISTRUSTED


def test_a_subject_that_names_none_is_not_asked() -> None:
    assert verdict(toy()).verdict is Verdict.UNSUPPORTED
    assert not any("implementation" in task.checks for task in tasks(toy(), load_profile("quick"), 0))


def test_a_subject_that_raises_is_blamed() -> None:
    def raises(*_arrays: Any, **_options: Any) -> Any:
        raise RuntimeError("no such kernel")

    result = verdict(toy(raises, implementation=lambda _case: "xla"))
    assert result.verdict is Verdict.FAIL
    assert "no such kernel" in result.message


def test_a_choice_that_goes_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `auto` itself: what should run is not asked of the code that chooses."""
    auto = find("auto")
    assert verdict(auto).verdict is Verdict.PASS
    wrong = choose.Implementation("xla", "tests.conformance.test_implementation_check")
    monkeypatch.setattr(choose, "IMPLEMENTATIONS", (wrong,))
    result = verdict(auto)
    assert result.verdict is Verdict.FAIL
    assert "xla was meant to run, and pallas_tpu ran its forward" in result.message


def flash_attention_with_lse(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """What the wrong choice runs."""
    out = through(in_pallas, plain)(query, key, value)
    return out, jnp.zeros((query.shape[0], query.shape[2], query.shape[1]), jnp.float32)


def test_auto_is_asked_each_feature_in_every_profile_that_judges_kernels() -> None:
    auto = find("auto")
    for name in profile_names():
        profile = load_profile(name)
        assert ("delegated" in profile.kinds) == ("drawn" in profile.kinds)
    quick = tuple(tasks(auto, load_profile("quick"), 0))
    held = [task.case for task in quick if {"implementation", "forward", "gradients"} <= set(task.checks)]
    assert {feature for case in held for feature in case.features} == auto.features
    assert {case.dtype for case in held} == set(auto.dtypes)
    assert len(quick) < 25


@pytest.mark.parametrize(("backend", "subject"), [("cpu", "xla.flash_attention"), ("gpu", "triton.cuda")])
def test_auto_declares_the_arithmetic_of_what_should_run(
    backend: str, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    auto, kernel = find("auto"), find(subject)
    tiling = kernel.tilings[-1]
    for dtype in auto.dtypes:
        assert auto.numerics(dtype, auto.tilings[0]) == kernel.numerics(dtype, tiling)
    assert auto.ready() == kernel.ready()
    assert auto.implementation is not None
    assert auto.implementation(CASE) == {"cpu": "xla", "gpu": "triton"}[backend]


def test_auto_says_where_it_declares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert find("auto").ready() == "declares no arithmetic for tpu"
