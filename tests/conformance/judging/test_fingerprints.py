"""What wrong values have in common is named where it is no accident, and never otherwise."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attest.conformance.cases.case import Case
from attest.conformance.judging.fingerprints import fingerprints

SHAPE = (2, 8, 3, 5)
CASE = Case(batch=2, q_len=8, kv_len=8, q_heads=3, kv_heads=1, head_dim=5, scale=0.3)


def drawn(seed):
    return np.random.default_rng(seed).normal(size=SHAPE)


def said(got, want, output="out", case=CASE, relative=1e-6):
    """The fingerprints, where a correct kernel errs by a part of each value."""
    bound = relative * np.abs(want)
    with np.errstate(invalid="ignore"):
        wrong = ~((np.abs(got.astype(np.float64) - want) <= bound) | (got == want))
    return fingerprints(output, got, want, wrong, bound, case)


SEEDS = st.integers(0, 2**31)


@given(SEEDS)
def test_values_rounded_to_bfloat16(seed):
    want = drawn(seed)
    assert said(want.astype(ml_dtypes.bfloat16).astype(np.float32), want) == (
        "every value is a number of bfloat16",
    )


@given(SEEDS, st.sampled_from([(0.3, "the scale"), (1 / 0.3, "1 / the scale"), (np.log(2), "log 2")]))
def test_a_factor_has_a_name(seed, factor):
    number, name = factor
    want = drawn(seed)
    assert said((want * number).astype(np.float32), want) == (
        f"every wrong value is the right one times {name}, {number:.4g}",
    )


def test_a_factor_without_a_name_is_a_number():
    want = drawn(0)
    assert said((want * 1.7).astype(np.float32), want) == ("every wrong value is the right one times 1.7",)


def test_zeros_and_nan():
    want = drawn(0)
    got = want.astype(np.float32)
    got[:, 3] = 0
    assert said(got, want) == ("every wrong value is 0",)
    got[:, 3] = np.nan
    assert said(got, want) == ("every wrong value is NaN",)


@pytest.mark.parametrize(
    ("output", "step", "words"),
    [("out", 1, "query before"), ("out", -1, "query after"), ("dkey", 1, "key before")],
)
def test_a_shift_along_the_sequence(output, step, words):
    want = drawn(0)
    got = np.roll(want, step, axis=1).astype(np.float32)
    assert said(got, want, output) == (f"every wrong value is the right one of the {words} it",)


@given(SEEDS, st.floats(1e-4, 10))
@example(2001608, 1e-4)  # within what equal factors may differ by
def test_values_that_have_nothing_in_common_have_no_fingerprint(seed, size):
    """A noise of any size, in all elements or in few: no mistake that has a name makes it."""
    want = drawn(seed)
    noise = np.random.default_rng(seed + 1).normal(size=SHAPE) * size
    noise[np.random.default_rng(seed + 2).random(SHAPE) < 0.5] = 0
    assert said((want + noise).astype(np.float32), want) == ()


@given(SEEDS)
def test_numbers_that_bfloat16_has_by_nature_are_no_fingerprint(seed):
    """Integers, whose right values are numbers of bfloat16, too."""
    want = np.round(drawn(seed) * 4)
    got = np.round(want + np.random.default_rng(seed).integers(1, 3, SHAPE)).astype(np.float32)
    assert not any("bfloat16" in text for text in said(got, want))


@given(SEEDS)
def test_rows_that_are_nearly_alike_are_not_shifted(seed):
    """Small errors, where the next row would do as well."""
    want = np.broadcast_to(drawn(seed)[:, :1], SHAPE) * (1 + 1e-5 * drawn(seed + 1))
    got = want * (1 + 1e-4 * drawn(seed + 2))
    assert said(got.astype(np.float32), want) == ()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_factor_in_sixteen_bits(name):
    """Their values are rounded, and a correct kernel errs by more than that."""
    want, dtype = drawn(0), np.dtype(getattr(ml_dtypes, name, name))
    got = (want / 0.3).astype(dtype)
    assert said(got, want, relative=1e-2) == (
        "every wrong value is the right one times 1 / the scale, 3.333",
    )


def test_a_factor_is_named_as_exactly_as_a_correct_kernel_shows_it():
    got = (1.005 * drawn(0) / 0.3).astype(np.float32)
    assert said(got, drawn(0), relative=1e-2) == (
        "every wrong value is the right one times 1 / the scale, 3.35",
    )
    assert said(got, drawn(0), relative=1e-5) == ("every wrong value is the right one times 3.35",)


def test_a_factor_of_two_names_has_both():
    case = replace(CASE, scale=1 / 3)
    assert said((drawn(0) / 3).astype(np.float32), drawn(0), case=case) == (
        "every wrong value is the right one times the scale or "
        "1 / the number of query heads that share a KV head, 0.3333",
    )


def test_three_elements_show_a_factor_that_has_a_name_and_no_other():
    """As in an lse of base 2, of which the other rows are empty."""
    want = np.array([0.3, 1.7, -2.2, -np.inf]).reshape(1, 1, 4)
    got = (want / np.log(2)).astype(np.float32)
    assert said(got, want, "lse") == ("every wrong value is the right one times 1 / log 2, 1.443",)
    assert said((want * 1.7).astype(np.float32), want, "lse") == ()


@pytest.mark.found_outside
@pytest.mark.parametrize("change", [lambda row: 1.7 * row, lambda row: 0 * row], ids=["factor", "zero"])
def test_one_row_shows_neither_a_factor_nor_zeros(change):
    """Its channels share weights: a row that sees one key has a factor whatever the mistake is."""
    want = drawn(0)
    got = want.astype(np.float32)
    got[1, 3, 2] = change(got[1, 3, 2])
    assert said(got, want) == ()
    sinks = drawn(0)[0, 0]
    got = sinks.astype(np.float32)
    got[1] = change(got[1])
    assert said(got, sinks, "dsoftmax_aux") == ()
    assert said(change(sinks[0].astype(np.float32)), sinks[0], "dsoftmax_aux") == ()


@pytest.mark.found_outside
def test_equal_numbers_show_no_factor():
    """A constant that replaces another, such as the lse of a finite sentinel."""
    want = np.full((1, 2, 30), -65504.0)
    assert said(np.full_like(want, -1e4).astype(np.float32), want, "lse") == ()


@pytest.mark.found_outside
@given(SEEDS)
def test_small_errors_are_no_factor_of_about_1(seed):
    want = drawn(seed)
    noise = np.random.default_rng(seed + 1).uniform(0.999, 1.001, SHAPE)
    assert said((want * noise).astype(np.float32), want) == ()


@pytest.mark.found_outside
def test_rows_of_zeros_are_no_shift():
    """A row that adds nothing, before rows whose right values are 0."""
    want = drawn(0)
    want[:, 4:] = 0
    got = want.astype(np.float32)
    got[:, 3] = 0
    assert "every wrong value is 0" in said(got, want)
    got[:, 3, 0] = 1e-30
    assert said(got, want) == ()


@pytest.mark.parametrize(
    ("nonfinite", "words"),
    [
        ([np.nan, np.nan], "2 of 4 wrong values are NaN"),
        ([-np.inf, -np.inf], "2 of 4 wrong values are -inf"),
        ([np.inf], "1 of 4 wrong values are inf"),
        ([np.inf, np.nan], "2 of 4 wrong values are NaN or infinite"),
        ([-np.inf] * 4, "every wrong value is -inf"),
    ],
)
def test_values_that_are_not_finite_are_counted(nonfinite, words):
    want = drawn(0)
    got = want.astype(np.float32)
    got.ravel()[:4] = [*nonfinite, *[77.0] * (4 - len(nonfinite))]
    assert said(got, want) == (words,)


@pytest.mark.found_outside
def test_one_value_everywhere_is_no_shift():
    """The lse of rows that see sinks alone, after a row that should see no more."""
    want = np.abs(drawn(0)[:, :, :, 0].transpose(0, 2, 1)) + 1
    want[..., 0] = 0.25
    got = want.copy()
    got[..., 1] = 0.25
    assert said(got.astype(np.float32), want, "lse") == ()


@pytest.mark.found_outside
def test_tiny_halves_are_numbers_of_bfloat16_by_nature():
    """A float16 that is subnormal has few bits."""
    want = drawn(0)
    assert said((want * 1e-6 * drawn(1)).astype(np.float16), want, relative=1e-2) == ()


def test_an_lse_of_bfloat16_beside_empty_rows():
    want = np.array([0.3, 1.7, -2.2, -np.inf, -np.inf]).reshape(1, 1, 5)
    got = want.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert said(got, want, "lse") == ("every value is a number of bfloat16",)


LARGE = np.random.default_rng(5).normal(size=(2, 40, 3, 16))


def rounded(want, dtype, towards=None):
    """The nearest numbers, or the nearest ones that are no further from 0."""
    near = want.astype(dtype)
    if towards is None:
        return near
    bits = near.view(np.uint16)
    return (
        np.where(np.abs(near.astype(np.float64)) > np.abs(want), bits - 1, bits).astype(np.uint16).view(dtype)
    )


@pytest.mark.parametrize("dtype", [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)], ids=str)
def test_truncated_values(dtype):
    """None lies outside of a bound of a unit in the last place."""
    unit = float(ml_dtypes.finfo(dtype).eps)
    assert said(rounded(LARGE, dtype, 0), LARGE, relative=unit) == ("values are truncated, not rounded",)
    assert said(rounded(LARGE[:, :3], dtype, 0), LARGE[:, :3], relative=unit) == ()
    assert said(rounded(LARGE, dtype), LARGE, relative=unit) == ()
    assert said(rounded(LARGE, dtype, 0).astype(np.float32), LARGE, relative=unit) == ()


@pytest.mark.parametrize("units", np.linspace(-3, 3, 61))
def test_a_factor_of_about_1_is_not_truncation(units):
    dtype = np.dtype(ml_dtypes.bfloat16)
    unit = float(ml_dtypes.finfo(dtype).eps)
    assert said(rounded(LARGE * (1 - units * unit / 4), dtype), LARGE, relative=unit) == ()


@given(SEEDS)
def test_errors_of_a_bound_or_two_are_no_shift_of_rows_that_are_alike(seed):
    want = np.broadcast_to(drawn(seed)[:, :1], SHAPE) * (1 + 1e-7 * drawn(seed + 1))
    assert said((want * (1 + 1.5e-6)).astype(np.float32), want) == ()


def test_one_wrong_element_has_no_factor():
    want = drawn(0)
    got = want.astype(np.float32)
    got[0, 0, 0, 0] *= 2
    assert said(got, want) == ()


@given(
    arrays(np.float32, SHAPE, elements=st.floats(width=32)),
    arrays(np.float64, SHAPE, elements=st.floats()),
    arrays(bool, SHAPE),
    st.sampled_from(["out", "dkey", "dbias"]),
)
def test_no_values_are_too_nonfinite(got, want, wrong, output):
    """NaN, infinities and numbers that overflow are outputs of wrong kernels; here, warnings are errors."""
    bound = np.abs(got.astype(np.float64))
    assert isinstance(fingerprints(output, got, want, wrong, bound, CASE), tuple)
    with np.errstate(all="ignore"):
        halves, nothing = got.astype(np.float16), 0 * bound
    assert isinstance(fingerprints(output, halves, want, wrong, nothing, CASE), tuple)


def test_a_shift_beside_rows_that_see_nothing():
    """An lse has -inf there, on both sides."""
    want = np.where(np.arange(8) < 6, drawn(0)[:, :, :, 0].transpose(0, 2, 1), -np.inf)
    got = want.copy()
    got[..., 1:6] = want[..., 0:5]
    assert said(got.astype(np.float32), want, "lse") == (
        "every wrong value is the right one of the query before it",
    )
