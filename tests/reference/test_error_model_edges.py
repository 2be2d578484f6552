"""The error model where nothing is seen, where calls are empty, and of kernels that declare what they do."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attest.reference.error_model import predict
from attest.reference.judgements import measure
from attest.reference.numerics import Numerics, coarse
from attest.reference.oracle import Cotangents, Sample, attention
from attest.reference.problem import make_problem
from attest.reference.semantics import STANDARD, Semantics
from tests.emulator.cases import (
    SMALL,
    Drawn,
    Shape,
    draw,
)
from tests.emulator.evidence import emulated, judged
from tests.emulator.flash import correct


def test_only_exact_zeros_will_do_where_nothing_is_seen() -> None:
    drawn = draw("normal", (), SMALL, "bfloat16", 6)
    mask = np.ones((1, 1, SMALL.q_len, SMALL.kv_len), np.bool_)
    mask[..., 3, :] = False
    mask[..., 7] = False
    problem = replace(drawn.problem, attention_mask=mask)
    prediction = predict(problem, STANDARD, correct("bfloat16")[1], drawn.cotangents)
    assert (prediction["out"].bound[:, 3] == 0).all()
    assert (prediction["lse"].bound[..., 3] == 0).all()
    assert (prediction["dquery"].bound[:, 3] == 0).all()
    assert (prediction["dkey"].bound[:, 7] == 0).all()
    assert (prediction["dvalue"].bound[:, 7] == 0).all()


def test_nan_under_the_mask_changes_nothing() -> None:
    drawn = draw("normal", (), SMALL, "float32", 6)
    mask = np.ones((1, 1, SMALL.q_len, SMALL.kv_len), np.bool_)
    mask[..., 5:9] = False
    clean = replace(drawn.problem, attention_mask=mask)
    key, value = clean.key.copy(), clean.value.copy()
    key[:, 5:7], value[:, 7:9] = np.nan, np.inf
    poisoned = replace(clean, key=key, value=value)
    numerics = correct("float32")[1]
    for name, prediction in predict(poisoned, STANDARD, numerics, drawn.cotangents).items():
        want = predict(clean, STANDARD, numerics, drawn.cotangents)[name]
        np.testing.assert_allclose(prediction.bound, want.bound, rtol=0.05, atol=1e-30)
        np.testing.assert_allclose(prediction.std, want.std, rtol=1e-9)


def test_a_sample_is_predicted_as_the_whole_is() -> None:
    drawn = draw("normal", ("causal", "bias", "sinks", "no_d_lse"), SMALL, "float32", 7)
    d_out = drawn.cotangents.out.copy()
    d_out[:, 4:] = 0
    numerics = correct("float32")[1]
    sample = Sample(np.array([12, 2, 3]), np.array([30, 0]))
    for d_lse in (None, np.zeros((2, 4, SMALL.q_len), np.float32)):
        cotangents = Cotangents(d_out, d_lse)
        whole = predict(drawn.problem, STANDARD, numerics, cotangents)
        part = predict(drawn.problem, STANDARD, numerics, cotangents, sample)
        assert set(part) == {"out", "lse", "dquery", "dkey", "dvalue"}
        for name, rows in (("out", 1), ("dquery", 1), ("lse", 2), ("dkey", 0), ("dvalue", 0)):
            index = sample.query_rows if rows else sample.key_rows
            want = np.take(whole[name].bound, index, axis=max(rows, 1))
            np.testing.assert_allclose(part[name].bound, want, rtol=1e-9, atol=1e-33)
            want = np.take(whole[name].std, index, axis=max(rows, 1))
            np.testing.assert_allclose(part[name].std, want, rtol=1e-6, atol=1e-33)


def test_the_prediction_has_what_the_oracle_answers() -> None:
    drawn = draw("normal", ("bias", "shared_sinks"), SMALL, "float32", 8)
    some = Semantics(gradients=frozenset({"key"}))
    for semantics, cotangents in ((STANDARD, drawn.cotangents), (STANDARD, None), (some, drawn.cotangents)):
        want = attention(drawn.problem, semantics, cotangents).items()
        got = predict(drawn.problem, semantics, correct("float32")[1], cotangents)
        assert {name: array.shape for name, array in want.items()} == {
            name: prediction.bound.shape for name, prediction in got.items()
        }


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 4), (4, 0), (0, 0)])
def test_empty_calls_are_predicted(q_len: int, kv_len: int) -> None:
    drawn = draw("normal", (), replace(SMALL, q_len=q_len, kv_len=kv_len), "float32", 8)
    for prediction in predict(drawn.problem, STANDARD, correct("float32")[1], drawn.cotangents).values():
        assert (prediction.bound == 0).all()


def test_the_gradients_of_float64_arguments_are_not_rounded_further() -> None:
    drawn = draw("normal", ("bias",), SMALL, "float32", 9)
    numerics = correct("float32")[1]
    wide = replace(drawn.problem, bias=drawn.problem.bias.astype(np.float64))  # type: ignore[union-attr]
    narrow = predict(drawn.problem, STANDARD, numerics, drawn.cotangents)["dbias"]
    assert (predict(wide, STANDARD, numerics, drawn.cotangents)["dbias"].bound <= narrow.bound).all()


# The declaration.


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("accumulator", -1.0, "accumulator: got -1.0, expected a number in"),
        ("weights", 1.0, "weights: got 1.0, expected a number in"),
        ("key_block", 0, "key_block: got 0, expected at least 1"),
        ("dot_keys", 0, "dot_keys: got 0, expected at least 1"),
        ("dot_lanes", 0, "dot_lanes: got 0, expected at least 1"),
        ("truncated", 0, "truncated: got 0, expected at least 1"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(field: str, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Numerics("float32", **{field: value})


# What third parties declare.


def beyond(numerics: Numerics, drawn: Drawn, got: dict[str, Any], dtype: str) -> set[str]:
    cases = judged(got, drawn, numerics, kernel="", dtype=dtype, family="normal", features=(), seed=0)
    return {case.output for case in cases if case.exceeded}


def test_weights_from_a_rounded_lse_are_to_be_declared() -> None:
    drawn = draw("normal", (), Shape(1, 40, 96, 2, 1, 32, 32), "float32", 5)
    arithmetic, numerics = correct("float32", lse="bfloat16")
    exact = attention(drawn.problem, drawn.semantics, drawn.cotangents)
    got = emulated(drawn, arithmetic)
    off = np.exp(exact.lse - got["lse"].astype(np.float64)).transpose(0, 2, 1)[..., None]
    got = {"out": (got["out"] * off).astype(np.float32), "lse": got["lse"]}
    assert beyond(numerics, drawn, got, "float32") == {"out"}
    assert beyond(replace(numerics, weights_from_lse=True), drawn, got, "float32") == set()


def test_rounded_partial_results_are_to_be_declared() -> None:
    drawn = draw("normal", (), Shape(1, 128, 1024, 1, 1, 64, 64), "bfloat16", 6)
    arithmetic, numerics = correct("bfloat16", out_accumulator="bfloat16")
    got = {name: array for name, array in emulated(drawn, arithmetic).items() if name in ("out", "lse")}
    assert beyond(numerics, drawn, got, "bfloat16") == {"out"}
    assert beyond(replace(numerics, partials=2.0**-8), drawn, got, "bfloat16") == set()


def test_delta_of_recomputed_weights_is_less_exact() -> None:
    drawn = draw("low_lse", ("causal",), SMALL, "float32", 7)
    _, numerics = correct("float32")
    call = (drawn.problem, drawn.semantics)
    usual = predict(*call, numerics, drawn.cotangents)["dquery"]
    summed = predict(*call, replace(numerics, delta_from_weights=True), drawn.cotangents)["dquery"]
    assert np.median(summed.std / np.maximum(usual.std, 1e-300)) > 1.1


@pytest.mark.parametrize("normalized", [True, False])
def test_small_gradients_of_logits_may_vanish_where_large_ones_are_scaled_down(normalized: bool) -> None:
    drawn = draw("peaked", (), SMALL, "float16", 8)
    problem = replace(drawn.problem, normalize_output=normalized)
    numerics = Numerics("float16", weights=2.0**-11, half_subnormal=2.0**-25)
    scaled = replace(numerics, d_logits_below=2.0**15)

    def bounds(numerics: Numerics, factor: float) -> dict[str, Any]:
        assert drawn.cotangents.out is not None
        cotangents = replace(drawn.cotangents, out=drawn.cotangents.out.astype(np.float32) * factor)
        found = predict(problem, STANDARD, numerics, cotangents)
        return {name: found[name].bound for name in ("dquery", "dkey", "dvalue")}

    for name, bound in bounds(numerics, 1.0).items():
        assert (bounds(scaled, 1.0)[name] == bound).all()
    large, allowed = bounds(numerics, 1e5), bounds(scaled, 1e5)
    assert (allowed["dvalue"] == large["dvalue"]).all()
    assert all((allowed[name] >= large[name]).all() for name in ("dquery", "dkey"))
    assert all((allowed[name] > large[name]).any() for name in ("dquery", "dkey"))


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan")])
def test_a_limit_of_gradients_of_logits_is_above_zero(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"^d_logits_below: got .*, expected a number above 0$"):
        Numerics("float16", d_logits_below=wrong)


def test_a_coarse_kernel_is_no_better_than_declared() -> None:
    declared = Numerics("float16", exponential=0.1, half_subnormal=2.0**-3)
    worst = coarse(declared)
    assert (worst.exponential, worst.half_subnormal, worst.accumulator) == (0.1, 2.0**-3, 2.0**-8)


# Where weights cannot be told.


def test_logits_beyond_their_own_rounding_leave_one_heavy_key() -> None:
    """The bound does not explode: whichever key is the heavy one, out is one of few values."""
    rng = np.random.default_rng(8)
    query, key, value = (rng.standard_normal((1, n, 1, 8)).astype(np.float32) for n in (4, 6, 6))
    problem = make_problem(query, key, value, softmax_scale=1e9)
    cotangents = Cotangents(np.ones((1, 4, 1, 8), np.float32))
    out = predict(problem, STANDARD, Numerics("float32"), cotangents)["out"]
    assert (out.bound < 10 * np.abs(value).max()).all()
    wrong = np.zeros((1, 4, 1, 8), np.float32)
    assert measure(wrong, attention(problem).out, out).worst_ratio > 10


@pytest.mark.parametrize(
    ("dtype", "features"), [("float32", ()), ("bfloat16", ("cap_15", "sinks", "dropout"))], ids=str
)
@pytest.mark.parametrize("rows", [True, False], ids=["of each row", "of all rows"])
def test_a_bias_that_keys_share(dtype: str, features: tuple[str, ...], rows: bool) -> None:
    """Its gradient sums a row, whose errors are not independent. A gradient that lacks a block is told."""
    drawn = draw("normal", features, Shape(q_len=32, kv_len=256, q_heads=2), dtype, 3)
    bias = np.random.default_rng(4).standard_normal((1, 2, 32 if rows else 1, 1)).astype(np.float32)
    shared = replace(drawn, problem=replace(drawn.problem, bias=bias))
    whole = np.broadcast_to(bias, (drawn.problem.batch, 2, 32, 256))
    arithmetic, numerics = correct(dtype)
    got = emulated(replace(drawn, problem=replace(drawn.problem, bias=whole)), arithmetic)
    axes = tuple(axis for axis, size in enumerate(bias.shape) if size == 1)
    labels: dict[str, Any] = {
        "kernel": "",
        "dtype": dtype,
        "family": "normal",
        "features": features,
        "seed": 3,
    }
    for each, red in ((got["dbias"], False), (got["dbias"][..., :192], True)):
        summed = {**got, "dbias": each.sum(axis=axes, keepdims=True, dtype=np.float32)}
        cases = {case.output: case for case in judged(summed, shared, numerics, **labels)}
        assert bool(cases["dbias"].exceeded) == red, cases["dbias"]
        assert [name for name, case in cases.items() if case.exceeded and name != "dbias"] == []
