"""What wrong values have in common is named where it is no accident, and never otherwise."""

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


def said(got, want, output="out", case=CASE):
    wrong = ~np.isclose(got.astype(np.float64), want, rtol=1e-6, atol=0)
    return fingerprints(output, got, want, wrong, case)


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
def test_no_values_are_too_strange(got, want, wrong, output):
    """NaN, infinities and numbers that overflow are outputs of wrong kernels; here, warnings are errors."""
    assert isinstance(fingerprints(output, got, want, wrong, CASE), tuple)


def test_a_shift_beside_rows_that_see_nothing():
    """An lse has -inf there, on both sides."""
    want = np.where(np.arange(8) < 6, drawn(0)[:, :, :, 0].transpose(0, 2, 1), -np.inf)
    got = want.copy()
    got[..., 1:6] = want[..., 0:5]
    wrong = np.isfinite(want) & (got != want)
    assert fingerprints("lse", got.astype(np.float32), want, wrong, CASE) == (
        "every wrong value is the right one of the query before it",
    )
