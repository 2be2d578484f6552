"""Poison is put where a mask or bias hides, in a pattern that its axes can have."""

from typing import Any

import pytest

from attest.conformance.cases.axes import BIASES, MASKS
from attest.conformance.cases.case import Case
from attest.conformance.drawing.poison import poisoned


@pytest.mark.parametrize(
    ("name", "axes"), [*(("mask", axes) for axes in MASKS), *(("bias", axes) for axes in BIASES)]
)
def test_patterns_are_those_of_the_axes(name: str, axes: str) -> None:
    """A mask hides at least pairs at random; a bias that is the same for all pairs hides nothing."""
    given: dict[str, Any] = {name: axes}
    case = Case(batch=2, q_len=5, kv_len=6, q_heads=2, kv_heads=2, **given)
    found = {poisoned(case, seed) for seed in range(12)}
    if found == {None}:
        assert name == "bias"
        assert axes.endswith("11")
        return
    patterns = {getattr(each, f"{name}_pattern") for each in found if each is not None}
    assert None not in found
    assert patterns <= {"first", "middle", "last", "rows"}
    assert all(each.poison for each in found if each is not None)
