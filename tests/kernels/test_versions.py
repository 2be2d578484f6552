"""Ranges of versions of JAX."""

import pytest

from attest.kernels.versions import Versions

RANGE = Versions((0, 6), (0, 13), without=((0, 11, 0),))


@pytest.mark.parametrize(
    ("version", "belongs"),
    [
        ((0, 5, 3), False),
        ((0, 6), True),
        ((0, 6, 0), True),
        ((0, 11, 0), False),
        ((0, 11, 1), True),
        ((0, 12, 99), True),
        ((0, 13, 0), False),
        ((1, 0, 0), False),
    ],
)
def test_a_version_belongs_to_a_range(version, belongs):
    assert (version in RANGE) == belongs


def test_a_range_is_shown_as_a_requirement():
    assert str(RANGE) == ">=0.6,!=0.11.0,<0.13"
    assert str(Versions((1,), (2,))) == ">=1,<2"
