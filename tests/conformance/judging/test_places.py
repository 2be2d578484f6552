"""Where an output is wrong is said in the words of its axes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attest.conformance.judging.places import places

SHAPE = (2, 34, 4, 8)  # batch entries, queries, heads, channels


def wrong_at(*places):
    wrong = np.zeros(SHAPE, bool)
    for place in places:
        wrong[place] = True
    return wrong


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ([np.s_[:]], ("everywhere",)),
        ([], ()),
        ([np.s_[:, 14]], ("query 14 of 34",)),
        ([np.s_[1, :, 3]], ("batch entry 1 of 2", "head 3 of 4")),
        ([np.s_[:, 8:16], np.s_[:, 32]], ("queries 8-15, 32 of 34",)),
        ([np.s_[:, 7::8]], ("1 query in 8, from 7, of 34",)),
        (
            [np.s_[:, [0, 3, 5, 9, 20]]],
            ("5 queries, from 0 to 20, of 34",),
        ),
    ],
)
def test_places_of_out(where, expected):
    assert places("out", wrong_at(*where)) == expected


def test_a_gradient_has_the_axes_of_its_input():
    assert places("dkey", wrong_at(np.s_[:, 32:, 1])) == ("keys 32-33 of 34", "KV head 1 of 4")
    assert places("dsoftmax_aux", np.array([False, True])) == ("sink 1 of 2",)


@given(arrays(bool, st.tuples(*[st.integers(1, 5)] * 4)))
def test_only_axes_with_right_places_are_named(wrong):
    said = places("out", wrong)
    assert bool(said) == wrong.any()
    partial = sum(
        0 < wrong.any(axis=tuple(other for other in range(4) if other != axis)).sum() < wrong.shape[axis]
        for axis in range(4)
    )
    assert len(said) == (partial or bool(wrong.any()))
