"""What the estimates count, beside XLA's own count of the same products and what is plain arithmetic."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.conformance.cases.build import build
from attest.conformance.cases.case import Case
from attest.conformance.compiling.devices import Peaks
from attest.conformance.compiling.roofline import BACKWARD, FORWARD, PASSES, Bound, Work, bound_of, work_of
from attest.conformance.judging.execute import call_of

PEAKS = Peaks("a toy", {"bfloat16": 100.0}, 10.0, "https://example.org")


def products(query: Any, key: Any, value: Any) -> Any:
    """The products of attention, without its softmax: what is counted."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    return jnp.einsum("bhqk,bkhd->bqhd", logits, value)


def gradients(query: Any, key: Any, value: Any, d_out: Any) -> Any:
    return jax.vjp(products, query, key, value)[1](d_out)


def counted_by_xla(function: Any, *arrays: Any) -> float:
    return jax.jit(function).lower(*arrays).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("value_dim", [None, 24])
def test_flops_are_those_that_xla_counts_in_the_products(value_dim):
    case = Case(
        batch=2, q_len=32, kv_len=64, q_heads=3, kv_heads=3, head_dim=16, value_dim=value_dim, dtype="float32"
    )
    problem = build(case).problem
    arrays = (problem.query, problem.key, problem.value)
    d_out = np.ones((2, 32, 3, case.value_width), np.float32)
    assert work_of(case, FORWARD).flops == counted_by_xla(products, *arrays)
    assert work_of(case, BACKWARD).flops == counted_by_xla(gradients, *arrays, d_out)


@pytest.mark.parametrize(
    ("fields", "pairs"),
    [
        ({}, 2 * 40 * 40),
        ({"causal": True}, 2 * 40 * 41 // 2),
        ({"causal": True, "q_len": 10}, 2 * sum(range(31, 41))),
        ({"causal": True, "window": (4, 0)}, 2 * (1 + 2 + 3 + 4 + 36 * 5)),
        ({"lengths": ((40, 30), (7, 9))}, 40 * 30 + 7 * 9),
        ({"batch": 1, "lengths": ((10, 12), (30, 20))}, 10 * 12 + 30 * 20),
        # What a mask or bias hides is not known before it is read.
        ({"mask": "b1"}, 2 * 40 * 40),
        ({"bias": "1hq", "bias_hides": True, "sinks": 2, "dropout": 0.5}, 2 * 40 * 40),
    ],
)
def test_pairs_that_no_row_sees_cost_nothing(fields, pairs):
    case = Case(
        **{"batch": 2, "q_len": 40, "kv_len": 40, "q_heads": 4, "kv_heads": 2, "head_dim": 8, **fields}
    )
    assert work_of(case, FORWARD).flops == pairs * 4 * (4 * 8)
    assert work_of(case, BACKWARD).flops == 2.5 * work_of(case, FORWARD).flops


def test_segments_leave_fewer_pairs():
    plain = Case(batch=2, q_len=64, kv_len=64, head_dim=8)
    segments = Case(batch=2, q_len=64, kv_len=64, head_dim=8, segments=4)
    assert 0 < work_of(segments, FORWARD).flops < work_of(plain, FORWARD).flops


def test_every_array_is_moved_once():
    case = Case("bfloat16", 2, 6, 9, 4, 2, 16, mask="b1", bias="1hq", sinks=2, segments=2)
    built = build(case)
    inputs = call_of(built).arrays
    read = sum(np.asarray(x).nbytes for x in inputs.values())
    of_out = built.cotangents.out.nbytes + built.cotangents.lse.nbytes
    gradients = sum(
        np.asarray(inputs[name]).nbytes for name in ("query", "key", "value", "bias", "softmax_aux")
    )
    assert work_of(case, FORWARD).bytes == read + of_out
    assert work_of(case, BACKWARD).bytes == read + 2 * of_out + gradients


@pytest.mark.parametrize(
    ("work", "bound"),
    [(Work(1000, 10), Bound(10.0, "compute")), (Work(1000, 1000), Bound(100.0, "memory"))],
)
def test_the_slower_of_the_two_bounds(work, bound):
    assert bound_of(work, "bfloat16", PEAKS) == bound


def test_no_bound_without_a_published_peak():
    assert bound_of(Work(1000, 10), "float32", PEAKS) is None


@pytest.mark.parametrize("which", PASSES)
def test_intensity_grows_with_length(which):
    short, long = (Case("bfloat16", q_len=n, kv_len=n, head_dim=64) for n in (128, 1024))
    assert work_of(long, which).intensity > work_of(short, which).intensity
