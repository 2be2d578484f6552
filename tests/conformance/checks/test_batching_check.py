"""The check batch_dims: a right kernel passes, and each wrong one fails."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attest.conformance.cases.build import build
from attest.conformance.cases.case import Case
from attest.conformance.checks import all_checks
from attest.conformance.checks.batching import batch_dims, split
from attest.conformance.judging.execute import call_of
from attest.conformance.record import Result, Verdict
from attest.conformance.running.judge import judge
from attest.conformance.subject import Limits, Subject
from attest.reference.leading import fold
from tests.toys import toy, toy_attention

CASE = Case(batch=6, q_len=3, kv_len=4, q_heads=2, kv_heads=1, head_dim=4, causal=True, seed=1)


def merged(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """The toy with any number of batch dimensions."""
    out = toy_attention(*(x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)), **options)
    return out.reshape(*query.shape[:-3], *out.shape[1:])


def in_another_order(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Counts the first batch dimension fastest."""
    out = merged(query, key, value, **options)
    return out if out.ndim < 5 else out.reshape(3, 2, *out.shape[2:]).swapaxes(0, 1)


def rounds_otherwise(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """One bit of float32 off where there are more batch dimensions than one."""
    out = merged(query, key, value, **options)
    return out if out.ndim == 4 else out * (1 + 2**-23)


def judged(call: Any, case: Case = CASE) -> Result:
    (result,) = judge(toy(call, limits=Limits(batch_dims=True)), case, ("batch_dims",))
    return result


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 6])
def test_a_right_kernel_passes(batch: int) -> None:
    result = judged(merged, replace(CASE, batch=batch))
    assert result.verdict is Verdict.PASS, result.message
    assert result.clauses == ("S27",)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (in_another_order, "batch dimensions (2, 3) instead of (6,) changed dkey, dquery, dvalue, out"),
        (rounds_otherwise, "batch dimensions (2, 3) instead of (6,) changed dkey, dquery, dvalue, out"),
        (toy_attention, "raised"),
    ],
)
def test_a_wrong_kernel_fails(call: Any, message: str) -> None:
    result = judged(call)
    assert result.verdict is Verdict.FAIL
    assert message in result.message


def test_a_sequence_without_a_batch_dimension_is_planned() -> None:
    result = judged(rounds_otherwise, replace(CASE, batch=1))
    assert "batch dimensions () instead of (1,)" in result.message


def test_who_is_asked() -> None:
    check = all_checks()["batch_dims"]
    assert check.applies(toy(limits=Limits(batch_dims=True))) is None
    assert check.applies(Subject("toy", call=print)) == "does not declare batch_dims"


def test_both_dimensions_are_above_1_where_they_can_be() -> None:
    assert {batch: batch_dims(batch) for batch in (1, 2, 4, 6, 7, 9)} == {
        1: (),
        2: (1, 2),
        4: (2, 2),
        6: (2, 3),
        7: (1, 7),
        9: (3, 3),
    }


WIDE = replace(
    CASE, q_heads=2, kv_heads=2, mask="1h", bias="b11", segments=2, dropout=0.5, origin=(1, 2, 3, 4)
)
SPLIT = {
    "arrays": WIDE,
    "broadcast": replace(WIDE, mask="bh", bias="1hq", positions="shard"),
    "positions": replace(WIDE, positions="shuffled", sinks=2),
    "offsets": replace(WIDE, q_offset=(1, 2, 0, -1, 1, 0)),
    "padded offsets": replace(WIDE, q_offset=(1, 2, 0, -1, 1, 0), lengths=((3, 4), (2, 4)) * 3),
    "packed offsets": replace(WIDE, batch=1, q_offset=(1, -1), lengths=((1, 2), (2, 2))),
}


@pytest.mark.parametrize("case", SPLIT.values(), ids=SPLIT)
def test_what_is_planned_is_the_same_call(case: Case) -> None:
    """By the reference's own reading of batch dimensions."""
    call = call_of(build(case))
    arrays = split(call.arrays, batch_dims(case.batch))
    assert arrays["query"].ndim == (5 if case.batch > 1 else 3)
    again = fold(**arrays, **dict(call.options)).problem
    for name, array in call.arrays.items():
        np.testing.assert_array_equal(getattr(again, name), array, err_msg=name)
