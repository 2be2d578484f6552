"""Refusals: each check can pass, can fail, and says which; what counts as naming an argument."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from attest.conformance.cases.case import Case
from attest.conformance.cases.features import ALL_FEATURES, COORDINATES, DTYPES, FEATURES, NEEDS
from attest.conformance.checks import all_checks
from attest.conformance.checks.refusal import CHECKS, said
from attest.conformance.judging.malformed import MALFORMED
from attest.conformance.record import Result, Verdict
from attest.conformance.running.judge import judge
from attest.conformance.running.plan import Restriction, load_profile, tasks
from attest.conformance.subject import Limits, Subject
from attest.conformance.validation import validate_call
from tests.toys import toy, toy_attention

NAMES = sorted(check.name for check in CHECKS)
NARROW = Limits(
    excludes=(
        frozenset({"mask", "bias"}),
        frozenset({"padded", "packed"}),
        frozenset({"q_offset", "positions"}),
        frozenset({"origin", "causal"}),
    ),
    origin_multiple=4,
    window_sides="left",
    length_multiple=8,
    head_dim_multiple=8,
    seed_bits=32,
)
EVERYTHING = {"features": frozenset(ALL_FEATURES), "dtypes": DTYPES}


def swallow(query: Any, key: Any, value: Any, **_options: Any) -> Any:
    """Returns zeros for whatever it is given."""
    return jnp.zeros((1,))


def subject_of(call: Callable[..., Any], **declared: Any) -> Subject:
    return toy(call, **declared)


def validating(**declared: Any) -> Subject:
    """A kernel that is nothing but its validation."""

    def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
        validate_call(query, key, value, supports=subject, **options)
        return swallow(query, key, value)

    subject = subject_of(call, **declared)
    return subject


def planned(subject: Subject) -> dict[str, Result]:
    """What a run says of the refusals of a subject, by check."""
    only = Restriction(checks=tuple(NAMES))
    results: list[Result] = []
    for task in tasks(subject, load_profile("quick"), seed=0, only=only):
        results += judge(subject, task.case, task.checks)
    return {result.check: result for result in results}


SUBJECTS: dict[str, dict[str, Any]] = {
    "everything": EVERYTHING,
    "nothing": {"features": frozenset()},
    "narrow": EVERYTHING | {"limits": replace(NARROW, sinks="shared")},
    "sinks of each head": {"features": frozenset({"sinks"}), "limits": Limits(sinks="per_head")},
    "no coordinates": {"features": frozenset(FEATURES)},
    "one dtype": {"features": frozenset({"causal"}), "dtypes": ("bfloat16",)},
}


@pytest.mark.parametrize("declared", SUBJECTS)
def test_one_line_of_validation_passes_every_refusal(declared: str) -> None:
    results = planned(validating(**SUBJECTS[declared]))
    assert results
    for name, result in results.items():
        malformed = name.removeprefix("refusal.") in MALFORMED
        expected = Verdict.PASS if malformed else Verdict.UNSUPPORTED
        assert result.verdict is expected, f"{name}: {result.message}"


@pytest.mark.parametrize("declared", SUBJECTS)
def test_each_refusal_fails_a_kernel_that_swallows_everything(declared: str) -> None:
    for name, result in planned(subject_of(swallow, **SUBJECTS[declared])).items():
        assert result.verdict is Verdict.FAIL, name
        assert "silently accepted" in result.message


def test_every_check_is_planned_to_somebody() -> None:
    asked = {name for declared in SUBJECTS.values() for name in planned(subject_of(swallow, **declared))}
    assert asked == set(NAMES)


def test_a_subject_that_traces_its_arrays_need_not_see_their_values() -> None:
    def asked(**declared: Any) -> set[str]:
        return set(planned(subject_of(swallow, **EVERYTHING, **declared)))

    assert asked() - asked(limits=Limits(traces=True)) == {
        f"refusal.{name}"
        for name in (
            *(
                f"{start}{side}_{wrong}"
                for start in ("lengths", "packed")
                for side in ("", "_k")
                for wrong in ("decreasing", "not_from_zero", "too_long")
            ),
            *("alibi_nan", "alibi_infinite"),
        )
    }


def test_a_call_without_the_arguments_of_coordinates_refuses_them() -> None:
    """The TypeError of Python names them; what another argument is named for does not count."""
    subject = toy(call=toy_attention)
    results = planned(subject)
    for feature in COORDINATES:
        assert results[f"refusal.undeclared_{feature}"].verdict is Verdict.UNSUPPORTED


@pytest.mark.parametrize("feature", COORDINATES)
def test_what_a_feature_needs_is_named_only_by_who_lacks_it(feature: str) -> None:
    """A kernel that refuses causal order has refused causal order, not the offset that it goes with."""
    needed = ALL_FEATURES[NEEDS[feature][0]].arguments[0]

    def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
        raise NotImplementedError(f"no {needed}")

    name = f"refusal.undeclared_{feature}"
    assert planned(subject_of(call, features=frozenset()))[name].verdict is Verdict.UNSUPPORTED
    declares = subject_of(call, features=frozenset({NEEDS[feature][0]}))
    assert f"names {' or '.join(ALL_FEATURES[feature].arguments)}" in planned(declares)[name].message


def test_a_feature_that_is_not_judged_is_not_to_be_refused() -> None:
    subject = subject_of(swallow, features=frozenset(FEATURES), unjudged=frozenset({"positions"}))
    names = set(planned(subject))
    assert "refusal.undeclared_origin" in names
    assert not any("positions" in name for name in names)


def test_a_subject_that_does_not_validate_is_asked_none() -> None:
    subject = subject_of(swallow, limits=replace(NARROW, validates=False), **EVERYTHING)
    assert planned(subject) == {}
    known = all_checks()
    assert all(known[name].applies(subject) is not None for name in NAMES)


@pytest.mark.parametrize(
    "error", [IndexError("sliding_window"), AssertionError("window"), SystemExit("window")]
)
def test_an_accident_is_no_refusal(error: BaseException) -> None:
    def raises(*_arrays: Any, **_options: Any) -> Any:
        raise error

    subject = subject_of(raises, features=frozenset({"window"}))
    case = Case(batch=2, q_len=5, kv_len=5, q_heads=2, kv_heads=2, head_dim=4)
    (result,) = judge(subject, case, ("refusal.window_negative",))
    assert result.verdict is Verdict.FAIL
    assert f"got {type(error).__name__}" in result.message


def test_a_broadcast_key_of_batch_1_is_seen() -> None:
    """A key of batch 1 fits queries of batch 2 by broadcasting, and nothing raises by itself."""

    def broadcasts(query: Any, key: Any, value: Any, **_options: Any) -> Any:
        weights = jnp.matmul(query.swapaxes(1, 2), key.transpose(0, 2, 3, 1))
        return jnp.matmul(weights, value.swapaxes(1, 2)).swapaxes(1, 2)

    results = planned(subject_of(broadcasts))
    for name in ("refusal.key_batch", "refusal.key_value_batch"):
        assert "silently accepted" in results[name].message


class SlidingWindowError(ValueError):
    """An exception whose name is its message."""


def chained() -> Exception:
    try:
        try:
            raise RuntimeError("no room for attention_MASK")
        except RuntimeError as cause:
            raise NotImplementedError from cause
    except NotImplementedError as error:
        return error


def noted() -> Exception:
    error = ValueError("out of range")
    error.add_note("argument: Softmax_Scale")
    return error


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (ValueError("first line\nthe Query is wrong"), "query"),
        (SlidingWindowError(), "window"),
        (chained(), "mask"),
        (noted(), "softmax_scale"),
    ],
)
def test_the_whole_text_counts_in_any_case(error: Exception, word: str) -> None:
    assert word in said(error)


@pytest.mark.parametrize(
    ("error", "word"),
    [(ValueError("no"), "value"), (TypeError("an unexpected keyword argument 'bias'"), "key")],
)
def test_words_that_name_no_argument(error: Exception, word: str) -> None:
    assert word not in said(error)
