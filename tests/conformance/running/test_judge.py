"""Verdicts: a correct kernel passes, and each way of being wrong is named."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.conformance.cases.case import Case
from attest.conformance.judging.trial import Trial
from attest.conformance.record import Result, Verdict
from attest.conformance.running.judge import judge, judge_trial
from attest.conformance.subject import Subject, Tiling, find
from attest.kernels.call import options
from attest.reference import defined
from tests.toys import LeaksTracers, modifies_its_input, toy, toy_attention

CASE = Case(q_len=5, kv_len=7, head_dim=4, causal=True, seed=3)


def verdict(subject: Subject, check: str, case: Case = CASE) -> Result:
    (result,) = judge(subject, case, (check,))
    return result


@pytest.mark.parametrize(
    ("blocks", "several"),
    [
        ((4, 4), True),
        ((4, None), True),
        ((4, 7), False),
        ((8, 4), False),
        ((None, 7), False),
        ((None, None), False),
    ],
)
def test_a_failure_says_whether_its_case_has_several_blocks(blocks, several):
    """Five queries and seven keys."""
    wrong = toy(partial(toy_attention, shift=0), tilings=(Tiling({}, 1, 1), Tiling({}, *blocks)))
    assert verdict(wrong, "forward", replace(CASE, tiling=-1)).several_blocks is several
    assert not verdict(toy(tilings=wrong.tilings), "forward").several_blocks


# Causal order hides no key from the last row, so that there is nowhere to put poison in the toy's cases.
HIDING = Case(q_len=5, kv_len=7, head_dim=4, mask="11", mask_pattern="first", seed=3)
ORACLE_CHECKS = ("forward", "gradients", "determinism", "poison", "purity", "undifferentiated")
TRANSFORM_CHECKS = (
    "transforms.eager",
    "transforms.grad_under_jit",
    "transforms.remat",
    "transforms.vmap",
    "transforms.scan",
    "transforms.no_retrace",
)


@pytest.mark.parametrize("check", [*ORACLE_CHECKS, *TRANSFORM_CHECKS])
def test_a_correct_kernel_passes(check: str) -> None:
    subject, case = (find("xla.attention"), HIDING) if check == "poison" else (toy(), CASE)
    result = verdict(subject, check, case)
    assert result.verdict is Verdict.PASS, result.message
    assert result.clauses


def broken(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *arrays, **options: change(toy_attention(*arrays, **options))


WRONG = {
    "shape (5, 4)": broken(lambda out: out[0, :, 0]),
    "dtype int32": broken(lambda out: out.astype(jnp.int32)),
    "NoneType": broken(lambda _out: None),
    "raised RuntimeError: no such kernel": broken(lambda _out: fail("no such kernel\nand a long traceback")),
    "raised ZeroDivisionError": broken(lambda _out: 1 // 0),
    "outside the error model: out (bound": broken(lambda out: out * 1.001),
}


def fail(message: str) -> None:
    raise RuntimeError(message)


@pytest.mark.parametrize("sentence", WRONG)
def test_a_wrong_return_is_one_sentence(sentence: str) -> None:
    result = verdict(toy(WRONG[sentence]), "forward")
    assert result.verdict is Verdict.FAIL
    assert sentence in result.message
    assert "\n" not in result.message or "raised" in sentence  # an exception keeps its whole text


def test_a_missing_lse_is_a_failure() -> None:
    result = verdict(toy(returns_lse=True), "lse")
    assert result.verdict is Verdict.FAIL
    assert "expected (out, lse)" in result.message


def test_a_wrong_gradient_is_seen_though_the_output_is_right() -> None:
    def half_the_gradient(out: Any) -> Any:
        return 0.5 * out + jax.lax.stop_gradient(0.5 * out)

    subject = toy(broken(half_the_gradient))
    assert verdict(subject, "forward").verdict is Verdict.PASS
    result = verdict(subject, "gradients")
    assert result.verdict is Verdict.FAIL
    assert {m.output for m in result.measurements if m.broken} == {"dquery", "dkey", "dvalue"}
    worst = result.measurements[0].worst
    assert worst is not None
    assert worst.got_hex.startswith("0x")


def test_a_kept_tracer_is_named() -> None:
    subject = toy(LeaksTracers())
    result = verdict(subject, "determinism")
    assert result.verdict is Verdict.PASS  # one trace alone leaks nothing yet
    result = verdict(subject, "transforms.vmap", replace(CASE, q_len=5))
    assert result.verdict is Verdict.FAIL
    assert "tracer" in result.message


def test_a_modified_input_is_named() -> None:
    result = verdict(toy(modifies_its_input), "purity")
    assert result.verdict is Verdict.FAIL
    assert "modified its input query" in result.message


def test_a_kernel_that_is_not_deterministic_fails_unless_it_says_so() -> None:
    import itertools

    counter = itertools.count()

    def noisy(out: Any) -> Any:
        noise = jax.pure_callback(
            lambda: jnp.float32(next(counter)) * 1e-3, jax.ShapeDtypeStruct((), jnp.float32)
        )
        return out + noise

    assert verdict(toy(broken(noisy)), "determinism").verdict is Verdict.FAIL
    declared = toy(broken(noisy), semantics=replace(toy().semantics, deterministic=False))
    assert verdict(declared, "determinism").verdict is Verdict.UNSUPPORTED


def test_a_leak_from_under_the_mask_is_named() -> None:
    right = find("xla.attention")

    def sums_everything(query: Any, key: Any, value: Any, **options: Any) -> Any:
        result = right.call(query, key, value, **options)
        return jax.tree.map(lambda array: array + 0 * value.sum(), result)

    result = verdict(replace(right, call=sums_everything), "poison", HIDING)
    assert result.verdict is Verdict.FAIL
    assert result.message.startswith("NaN and inf stored in hidden places changed out\n")


def test_poison_that_has_no_place_is_inconclusive() -> None:
    result = verdict(toy(), "poison")
    assert (result.verdict, "hides nothing" in result.message) == (Verdict.INCONCLUSIVE, True)


def differentiated_alone(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The toy with a derivative of its own, whose forward pass is changed where it is differentiated."""

    def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
        def plain(*arrays: Any) -> Any:
            return toy_attention(*arrays, **options)

        @jax.custom_vjp
        def attend(*arrays: Any) -> Any:
            return plain(*arrays)

        def forward(*arrays: Any) -> Any:
            out, pull = jax.vjp(plain, *arrays)
            return change(out), pull

        attend.defvjp(forward, lambda pull, cotangent: pull(cotangent))
        return attend(query, key, value)

    return call


def test_what_is_wrong_under_differentiation_alone_says_so() -> None:
    subject = toy(differentiated_alone(lambda out: 1.01 * out))
    result = verdict(subject, "forward")
    assert (result.verdict, result.clauses) == (Verdict.FAIL, ("S22",))
    assert "only under differentiation" in result.message
    assert verdict(subject, "undifferentiated").verdict is Verdict.PASS


def test_what_is_wrong_without_differentiation_alone_is_seen_and_says_so() -> None:
    def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
        @jax.custom_vjp
        def attend(*arrays: Any) -> Any:
            return 1.01 * toy_attention(*arrays, **options)

        attend.defvjp(
            lambda *arrays: jax.vjp(lambda *a: toy_attention(*a, **options), *arrays),
            lambda pull, cotangent: pull(cotangent),
        )
        return attend(query, key, value)

    subject = toy(call)
    assert verdict(subject, "forward").verdict is Verdict.PASS
    result = verdict(subject, "undifferentiated")
    assert (result.verdict, result.clauses) == (Verdict.FAIL, ("S22",))
    assert "only without differentiation" in result.message


def test_what_is_wrong_either_way_blames_no_differentiation() -> None:
    subject = toy(broken(lambda out: out * 1.01))
    for check in ("forward", "undifferentiated"):
        result = verdict(subject, check)
        assert result.verdict is Verdict.FAIL
        assert "alone" not in result.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: g.astype(jnp.float32), "dkey of dtype float32, expected bfloat16"),
        (lambda g: g[..., None], "dkey of shape (1, 7, 1, 4, 1), expected (1, 7, 1, 4)"),
    ],
    ids=["dtype", "shape"],
)
def test_a_gradient_of_another_dtype_or_shape_is_named(
    change: Callable[[Any], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(function: Callable[..., Any], *arrays: Any) -> Any:
        outputs, pull = vjp(function, *arrays)
        return outputs, lambda cotangents: jax.tree.map(change, pull(cotangents))

    vjp = jax.vjp
    monkeypatch.setattr(jax, "vjp", spoilt)
    result = verdict(toy(dtypes=("bfloat16",)), "gradients", replace(CASE, dtype="bfloat16"))
    assert result.verdict is Verdict.FAIL
    assert words in result.message


def test_a_retracing_kernel_is_named() -> None:
    def compiles_every_time(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return jax.jit(lambda *arrays: toy_attention(*arrays, **options))(query, key, value)

    result = verdict(toy(compiles_every_time), "transforms.no_retrace")
    assert result.verdict is Verdict.FAIL
    assert "compiled" in result.message


def test_a_case_that_cannot_tell_is_inconclusive() -> None:
    """One row under a causal mask sees every key, so causal or not is the same."""
    blind = Case(q_len=1, kv_len=3, head_dim=2, causal=True)
    result = verdict(toy(), "forward", blind)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "causal" in result.message


def test_inconclusive_does_not_hide_a_failure() -> None:
    blind = Case(q_len=1, kv_len=3, head_dim=2, causal=True)
    assert verdict(toy(broken(lambda out: out + 1)), "forward", blind).verdict is Verdict.FAIL


def test_an_undeclared_case_is_unsupported() -> None:
    result = verdict(toy(), "forward", Case(q_len=2, kv_len=2, soft_cap=3.0))
    assert result.verdict is Verdict.UNSUPPORTED
    assert "soft_cap" in result.message


def test_a_broken_harness_is_an_error_not_a_failure() -> None:
    def broken_numerics(dtype: str, tiling: object) -> Any:
        raise KeyError(dtype)

    result = verdict(toy(numerics=broken_numerics), "forward")
    assert result.verdict is Verdict.ERROR
    assert "KeyError" in result.message


def test_an_unknown_check_names_the_known_ones() -> None:
    with pytest.raises(LookupError, match="forward"):
        judge(toy(), CASE, ("nonsense",))


REFUSED = ("refusal.undeclared_sinks", "refusal.undeclared_mask", "refusal.undeclared_dropout")


@pytest.mark.parametrize("check", REFUSED)
def test_a_refused_feature_is_unsupported(check: str) -> None:
    assert verdict(toy(), check, Case(batch=2, q_len=5, kv_len=5)).verdict is Verdict.UNSUPPORTED


@pytest.mark.parametrize("check", REFUSED)
def test_a_swallowed_feature_is_a_failure(check: str) -> None:
    def swallows(query: Any, key: Any, value: Any, **_options: Any) -> Any:
        return toy_attention(query, key, value)

    result = verdict(toy(swallows), check, Case(batch=2, q_len=5, kv_len=5))
    assert result.verdict is Verdict.FAIL
    assert "silently accepted" in result.message


def test_a_malformed_argument_must_be_named() -> None:
    base = Case(batch=2, q_len=5, kv_len=5, q_heads=2, kv_heads=2, head_dim=4)
    assert verdict(toy(), "refusal.key_head_dim", base).verdict is Verdict.PASS
    result = verdict(toy(), "refusal.scale_nan", base)
    assert result.verdict is Verdict.FAIL
    assert "scale" in result.message


class Instrumented:
    """The toy under an instrument that sees a bad access in every call, of which it tells once."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        jax.debug.callback(lambda: self.seen.append("toy read 'key' 3 elements past its end"))
        return toy_attention(*arrays, **options)

    def violations(self) -> list[str]:
        jax.effects_barrier()
        seen, self.seen = self.seen[:1], []
        return seen


@pytest.mark.parametrize("check", [*ORACLE_CHECKS, *TRANSFORM_CHECKS])
def test_an_access_outside_the_arrays_fails_whatever_is_tested(check: str) -> None:
    call = Instrumented()
    result = verdict(toy(call, violations=call.violations), check)
    assert (result.verdict, result.clauses) == (Verdict.FAIL, ("S19",))
    assert result.message == "toy read 'key' 3 elements past its end"


def test_an_access_of_an_earlier_call_is_not_this_ones() -> None:
    told = ["a sentence of an earlier call"]

    def violations() -> list[str]:
        return [told.pop()] if told else []

    assert verdict(toy(violations=violations), "forward").verdict is Verdict.PASS


def test_an_output_outside_its_bound_needs_no_prediction_of_repeated_roundings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rounds(*arrays: Any, **options: Any) -> Any:
        return jax.lax.reduce_precision(toy_attention(*arrays, **options), 8, 7)

    monkeypatch.setattr(Trial, "repeated_predictions", {})
    result = verdict(toy(rounds), "forward")
    assert (result.verdict, result.measurements[0].broken[0]) == (Verdict.FAIL, "bound")
    assert "semantics" not in result.measurements[0].broken


def _with(query: list[float], key: list[float]) -> Trial:
    """A trial of the toy whose rows and keys are all alike."""
    trial = Trial(toy(), Case(q_len=2, kv_len=3, head_dim=2))
    problem = trial.built.problem
    problem = replace(
        problem,
        query=np.full_like(problem.query, 1) * np.array(query, np.float32),
        key=np.full_like(problem.key, 1) * np.array(key, np.float32),
    )
    vars(trial)["built"] = replace(trial.built, problem=problem)
    return trial


@pytest.mark.found_outside
def test_a_case_whose_products_overflow_shows_nothing() -> None:
    """Each exact logit is 0, and a correct kernel adds inf to -inf."""
    (result,) = judge_trial(_with([1e30, -1e30], [1e30, 1e30]), ("forward",))
    assert (result.verdict, result.message) == (
        Verdict.INCONCLUSIVE,
        "the logit of a visible pair, or the products in it, may overflow float32 (S1)",
    )
    (result,) = judge_trial(_with([1e18, -1e18], [1e18, 1e18]), ("forward",))
    assert "overflow" not in result.message


@pytest.mark.found_outside
@pytest.mark.parametrize("change", [{"scale": 1e38}, {"scale": -1e-35}, {"soft_cap": 1e35}])
def test_a_case_outside_of_the_tested_range_shows_nothing(change: dict[str, float]) -> None:
    case = replace(CASE, **change)
    found = [verdict(find("xla.flash_attention"), check, case) for check in ("forward", "determinism")]
    assert {result.verdict for result in found} == {Verdict.INCONCLUSIVE}
    assert {"outside of the tested range" in result.message for result in found} == {True}


@pytest.mark.parametrize("scale", [2.0**100, -(2.0**100), 2.0**-100, 0.0])
@pytest.mark.parametrize("name", ["xla.flash_attention", "xla.attention"])
def test_our_kernels_take_scales_to_the_ends_of_the_range(name: str, scale: float) -> None:
    found = [verdict(find(name), check, replace(CASE, scale=scale)) for check in ("forward", "gradients")]
    assert {result.verdict for result in found} <= {Verdict.PASS, Verdict.INCONCLUSIVE}, found
    assert not any("S1" in result.message or "range" in result.message for result in found)


def test_both_sides_refuse_the_same_scales_and_caps() -> None:
    assert (options.SCALE_RANGE, options.CAP_RANGE) == (defined.SCALE_RANGE, defined.CAP_RANGE)
