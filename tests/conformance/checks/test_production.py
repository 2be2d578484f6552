"""Production size: the sample is the whole answer's, and a defect that only large offsets show is found."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attest.conformance.cases.case import Case
from attest.conformance.cases.large_inputs import build_bulk
from attest.conformance.drawing import production
from attest.conformance.drawing.production import build_sampled, host_gib, load_production, memory_limit
from attest.conformance.record import Result, Verdict
from attest.conformance.running.judge import judge
from attest.conformance.running.plan import Restriction, load_profile, tasks
from attest.conformance.subject import find
from attest.kernels.xla import flash_attention_with_lse
from attest.reference.numerics import Numerics
from attest.reference.oracle import attention
from attest.reference.semantics import STANDARD

XLA = find("xla.flash_attention")
LONG = Case(
    dtype="bfloat16", q_len=2048, kv_len=2048, q_heads=4, kv_heads=2, head_dim=32, causal=True, tiling=2
)

# Every way in which a problem is cut into blocks.
CUT = {
    "dense": Case(batch=2, q_len=9, kv_len=13, q_heads=6, kv_heads=2, head_dim=4, value_dim=3),
    "causal": Case(batch=3, q_len=11, kv_len=8, q_heads=4, kv_heads=4, head_dim=2, causal=True, soft_cap=2.0),
    "mask": Case(batch=2, q_len=7, kv_len=8, q_heads=4, kv_heads=2, mask="bh"),
    "one mask": Case(batch=2, q_len=7, kv_len=8, q_heads=4, kv_heads=2, mask="11"),
    "segments": Case(batch=2, q_len=9, kv_len=9, q_heads=2, segments=3, window=(3, 1)),
    "padded": Case(batch=2, q_len=9, kv_len=12, q_heads=2, lengths=((5, 12), (9, 3)), sinks=2),
    "packed": Case(q_len=14, kv_len=12, q_heads=2, lengths=((5, 9), (7, 3)), causal=True),
    "offsets": Case(batch=2, q_len=7, kv_len=9, q_heads=2, causal=True, q_offset=(3, -1)),
    "packed offsets": Case(
        q_len=14, kv_len=12, q_heads=2, lengths=((5, 9), (7, 3)), causal=True, q_offset=(3, 1)
    ),
    "sinks": Case(batch=2, q_len=5, kv_len=6, q_heads=4, kv_heads=2, sinks=1, sinks_per_head=True),
    "dropout": Case(q_len=8, kv_len=9, q_heads=3, dropout=0.3),
}


def judged(call: Any = flash_attention_with_lse, case: Case = LONG) -> Result:
    (result,) = judge(replace(XLA, call=call), case, ("production",))
    return result


@pytest.mark.parametrize("title", CUT)
def test_the_blocks_hold_the_whole_answer(title: str) -> None:
    case = replace(CUT[title], seed=5)
    sampled = build_sampled(case, returns_lse=True)
    whole = attention(sampled.built.problem, STANDARD, sampled.built.cotangents)
    answer, predictions = sampled.truth(STANDARD, Numerics("float32"))
    expected = sampled.part(whole.items())
    assert set(answer.items()) == set(predictions) == {"out", "lse", "dquery", "dkey", "dvalue"}
    for name, array in answer.items().items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-12, atol=1e-13, err_msg=name)
        assert predictions[name].bound.shape == array.shape
        for index in np.ndindex(array.shape):
            assert whole.items()[name][sampled.place(name, index)] == expected[name][index]


@pytest.mark.parametrize(
    "case",
    [
        LONG,
        replace(LONG, dtype="float16", kv_heads=1, causal=False, dropout=0.2, sinks=1, sinks_per_head=True),
        replace(LONG, window=(1500, 0), soft_cap=5.0, segments=2),
        replace(LONG, lengths=((1, 1), (1200, 1200), (20, 20), (800, 800)), head_dim=24),
        replace(LONG, dtype="float32", mask="11"),
    ],
    ids=["causal", "dropout", "window", "packed", "mask"],
)
def test_a_right_kernel_passes(case: Case) -> None:
    result = judged(case=case)
    assert result.verdict is Verdict.PASS, result.message
    assert {m.output for m in result.measurements} == {"out", "lse", "dquery", "dkey", "dvalue"}


def _late_rows_are_off(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """As a row offset that overflows: the last rows of the last head read what lies before them."""
    out, lse = flash_attention_with_lse(query, key, value, **options)
    return out.at[:, 1990:, -1].set(out[:, 1932:1990, -1]), lse


def _late_keys_are_lost(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """The last keys of the last head take no part, and get no gradient."""
    length, heads = key.shape[1:3]
    lost = np.zeros((1, 1, query.shape[1], length), bool)
    lost[..., 1940:] = True
    mask = np.broadcast_to(lost, (1, query.shape[2], *lost.shape[2:])).copy()
    mask[:, : -query.shape[2] // heads] = False
    return flash_attention_with_lse(query, key, value, attention_mask=~mask, **options)


@pytest.mark.parametrize(
    ("call", "outputs"),
    [(_late_rows_are_off, {"out"}), (_late_keys_are_lost, {"dkey", "dvalue"})],
)
def test_a_defect_at_large_offsets_is_found(call: Any, outputs: set[str]) -> None:
    result = judged(call)
    assert result.verdict is Verdict.FAIL
    broken = {m.output: m.worst for m in result.measurements if m.broken}
    assert outputs <= set(broken)
    for name in outputs:
        assert broken[name] is not None
        assert broken[name].index[1] >= 1940, "the place is that in the whole output"


def test_a_stray_gradient_is_found() -> None:
    sampled = build_sampled(LONG, returns_lse=True)
    d_query = np.zeros_like(sampled.built.problem.query)
    assert sampled.stray_rows(d_query) == []
    dead = next(row for row in range(5, 2048) if row not in sampled.blocks[0].rows)
    d_query[0, dead, 3, 7] = -0.0
    d_query[0, sampled.blocks[0].rows[1], 0, 0] = 1.0
    assert sampled.stray_rows(d_query) == []
    d_query[0, dead, 3, 7] = np.nan
    assert sampled.stray_rows(d_query) == [(0, dead)]


def test_values_are_the_same_everywhere() -> None:
    problem = build_bulk(replace(LONG, mask="11"))
    digest = hashlib.sha256()
    for array in (problem.query, problem.key, problem.value, problem.attention_mask):
        assert array is not None
        digest.update(array.tobytes())
    assert digest.hexdigest()[:16] == "ea0498b0638eec33"
    assert abs(float(problem.query.astype(np.float64).std()) - 1) < 0.01
    assert problem.attention_mask is not None
    assert abs(problem.attention_mask.mean() - 0.75) < 0.01


@pytest.mark.parametrize(
    ("case", "field"),
    [
        (Case(family="uniform"), "family"),
        (Case(bias="111"), "bias"),
        (Case(mask="11", integer_mask=True), "integer_mask"),
        (Case(causal=True, poison=True), "poison"),
    ],
)
def test_what_only_small_problems_have_is_refused(case: Case, field: str) -> None:
    with pytest.raises(ValueError, match=rf"case field {field}: got .* expected .* at production size"):
        build_bulk(case)


def test_the_listed_problems() -> None:
    cases = load_production()
    assert len({case.id for case in cases}) == len(cases)
    assert {8192, 32768, 131072} <= {case.q_len for case in cases}
    assert {64, 128, 256} <= {case.head_dim for case in cases}
    for feature in ("causal", "window", "segments", "soft_cap", "sinks", "dropout", "packed", "mask", "gqa"):
        assert any(feature in case.features for case in cases), feature
    assert any(case.batch * case.q_len * case.q_heads * case.head_dim > 2**31 for case in cases)
    assert any(case.mask and case.q_len * case.kv_len > 2**31 for case in cases)
    packed = next(case.lengths for case in cases if "packed" in case.features)
    assert packed is not None
    assert len(packed) == 64
    assert (min(packed), max(packed)) == ((1, 1), (20_000, 20_000))


@pytest.mark.parametrize("case", load_production(), ids=lambda case: case.id)
def test_a_problem_fits_into_host_memory(case: Case) -> None:
    assert host_gib(case) < memory_limit()


def test_dropout_of_many_heads_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(
        production, "_table", lambda: {"case": [{"dropout": 0.1, "q_heads": 2, "kv_heads": 2}]}
    )
    with pytest.raises(ValueError, match=r"case 1: case field dropout: got batch 1, kv_heads 2"):
        load_production.__wrapped__()


def test_they_are_given_to_those_who_take_such_lengths() -> None:
    profile = load_profile("production")
    assert list(tasks(XLA, profile, 0)) == []
    sampled = [task.case for task in tasks(find("triton.cuda"), profile, 0)]
    assert [replace(case, tiling=0) for case in sampled] == list(load_production())
    assert {case.tiling for case in sampled} == {1}
    half = list(tasks(find("triton.cuda"), profile, 0, Restriction(dtypes=("float16",))))
    assert {task.case.dtype for task in half} == {"float16"}
