"""A search for a simpler failing case stays with the failure that it began with and with what is promised."""

from dataclasses import replace

import numpy as np

from attest.conformance.cases.case import Case
from attest.conformance.record import Measurement, Verdict
from attest.conformance.running import shrink as shrinking
from attest.conformance.running.judge import judge
from attest.conformance.running.shrink import Failure
from tests import toys
from tests.conformance.running.fakes import result


def shrink(subject, failing, evaluations, stays_of_precision=False):
    (found,) = shrinking.shrink(subject, [Failure(failing, stays_of_precision)], evaluations)
    return found


LARGE = Case(q_len=6, kv_len=4, causal=True, head_dim=4, seed=5)


def test_no_case_is_entered_that_the_dialect_leaves_open():
    """With fewer keys than queries some rows see no key: there this subject promises nothing and is wrong."""

    def call(query, key, value, *, causal=False):
        out = toys.right.call(query, key, value, causal=causal)
        empty = np.arange(query.shape[1]) < query.shape[1] - key.shape[1]
        return out + np.float32(empty & causal)[None, :, None, None] + np.float32(query.shape[1] > 2)

    subject = replace(toys.promises_little, call=call)
    start = replace(LARGE, kv_len=6)
    (failing,) = judge(subject, start, ("forward",))
    assert failing.verdict is Verdict.FAIL
    minimal = shrink(subject, failing, 200)
    assert minimal.verdict is Verdict.FAIL
    assert minimal.case.q_len == 3
    assert not minimal.case.causal or minimal.case.kv_len >= 3
    (open_to_it,) = judge(subject, Case(q_len=2, kv_len=1, causal=True), ("forward",))
    assert open_to_it.verdict is Verdict.UNSUPPORTED
    assert "unspecified" in open_to_it.message


def test_a_failure_of_precision_beside_one_of_meaning_does_not_end_as_one(monkeypatch):
    imprecise = (Measurement("out", 1, 2.0, 1.0, 1.0, 0.0, broken=("rms",)),)

    def found(subject, case, checks):
        numbers = imprecise if case.q_len >= 3 else ()
        return [result(case, checks[0], Verdict.FAIL, measurements=numbers)]

    monkeypatch.setattr(shrinking, "judge", found)
    (failing,) = found(None, LARGE, ("forward",))
    assert shrink(toys.right, failing, 200, stays_of_precision=True).case.q_len == 3
    assert shrink(toys.right, replace(failing, measurements=()), 200).case.q_len == 1


def test_the_case_that_is_shown_passes_once_the_kernel_is_mended():
    """One query and one key fail without the diagonal, but a kernel without causal order passes there too."""

    def call(query, key, value, *, causal=False):
        out = toys.right.call(query, key, value, causal=causal)
        return out + np.float32(1) if causal else out

    (failing,) = judge(replace(toys.right, call=call), LARGE, ("forward",))
    minimal = shrink(replace(toys.right, call=call), failing, 200)
    assert minimal.case.q_len + minimal.case.kv_len < LARGE.q_len + LARGE.kv_len
    (mended,) = judge(toys.right, minimal.case, ("forward",))
    assert mended.verdict is Verdict.PASS


def fails_if(monkeypatch, wrong, seen=None):
    """Let a check of semantics fail where `wrong` is true of the case; add each judged case to `seen`."""

    def found(subject, case, checks):
        if seen is not None:
            seen.append(case)
        return [result(case, check, Verdict.FAIL if wrong(case) else Verdict.PASS) for check in checks]

    monkeypatch.setattr(shrinking, "judge", found)
    return lambda case: found(None, case, ("forward",))[0]


def test_a_failure_that_comes_and_goes_with_the_length_is_still_shown_small(monkeypatch):
    """Between 3 and 16 tokens all is well, so no search that goes down step by step ends below 17."""
    judged = fails_if(monkeypatch, lambda case: case.causal and not 2 < case.q_len <= 16)
    failing = judged(replace(LARGE, q_len=20, kv_len=20))
    assert failing.verdict is Verdict.FAIL
    assert shrink(toys.right, failing, 50).case.q_len <= 2


def test_a_failure_that_blunt_values_make_one_of_precision_may_end_as_one_of_meaning(monkeypatch):
    imprecise = (Measurement("out", 1, 2.0, 1.0, 1.0, 0.0, broken=("rms",)),)

    def found(subject, case, checks):
        return [
            result(case, checks[0], Verdict.FAIL, measurements=imprecise if case.family == "peaked" else ())
        ]

    monkeypatch.setattr(shrinking, "judge", found)
    (failing,) = found(None, replace(LARGE, family="peaked"), ("forward",))
    assert shrink(toys.right, failing, 200).case.family == "normal"
    assert shrink(toys.right, failing, 200, stays_of_precision=True).case.family == "peaked"


def test_searches_of_one_case_share_what_they_judge(monkeypatch):
    judged = []
    fails_if(monkeypatch, lambda case: case.q_len >= 3, seen=judged)
    failures = [
        Failure(result(LARGE, check, Verdict.FAIL)) for check in ("lse", "refusal.mask_shape", "purity")
    ]
    ends = shrinking.shrink(toys.right, failures, 200)
    assert [(end.check, end.case.q_len) for end in ends] == [
        ("lse", 3),
        ("refusal.mask_shape", 3),
        ("purity", 3),
    ]
    assert len(judged) == len(set(judged))


def test_a_search_that_runs_out_of_time_keeps_what_it_has_found_and_says_so(monkeypatch):
    now = [0.0]

    def found(subject, case, checks):
        now[0] += 1
        return [result(case, checks[0], Verdict.FAIL)]

    monkeypatch.setattr(shrinking, "judge", found)
    monkeypatch.setattr(shrinking.time, "monotonic", lambda: now[0])
    failing = Failure(result(LARGE, "purity", Verdict.FAIL))
    (whole,) = shrinking.shrink(toys.right, [failing], 200)
    (cut,) = shrinking.shrink(toys.right, [failing], 200, seconds=0.5)
    assert not whole.cut
    assert cut.cut
    assert cut.verdict is Verdict.FAIL


def test_a_failure_that_needs_many_keys_loses_its_other_features_first(monkeypatch):
    """A mistake at the edge of a block of keys: no small case has one."""
    judged = fails_if(monkeypatch, lambda case: case.kv_len > 20)
    subject = replace(toys.right, features=frozenset({"causal", "scale"}))
    start = Case(batch=3, q_len=40, kv_len=64, q_heads=2, kv_heads=2, head_dim=8, causal=True, seed=5)
    case = shrink(subject, judged(start), 60).case
    assert (case.features, case.batch, case.q_len, case.kv_heads) == (frozenset(), 1, 1, 1)
    assert 20 < case.kv_len <= 28


def test_what_else_fails_on_a_simplest_case_is_there(monkeypatch):
    """So that a failure which follows from another one is seen to share its case."""

    def judged(_subject, case, checks):
        least = {"forward": 3, "gradients": 2}
        return [
            result(case, check, Verdict.FAIL if case.q_len >= least[check] else Verdict.PASS)
            for check in checks
        ]

    monkeypatch.setattr(shrinking, "judge", judged)
    failures = [Failure(result(LARGE, check, Verdict.FAIL)) for check in ("forward", "gradients")]
    ends = shrinking.shrink(toys.right, failures, 200)
    assert [(end.check, end.case.q_len) for end in ends] == [
        ("forward", 3),
        ("gradients", 2),
        ("gradients", 3),
    ]


def test_a_failure_on_a_simpler_case_of_an_earlier_search_needs_no_search(monkeypatch):
    judged = []
    fails_if(monkeypatch, lambda case: case.q_len >= 3, seen=judged)
    failures = [Failure(result(LARGE, "lse", Verdict.FAIL))]
    passes, fails_too = (
        result(replace(LARGE, q_len=q_len), "forward", Verdict.FAIL, cut=True) for q_len in (2, 4)
    )
    (end,) = shrinking.shrink(toys.right, failures, 200, simple=[passes, fails_too])
    assert judged == [passes.case, fails_too.case] == [passes.case, end.case]
    assert end.cut
    # The case that a search begins with is no simpler one.
    (searched,) = shrinking.shrink(toys.right, failures, 200, simple=[result(LARGE, "forward", Verdict.FAIL)])
    assert searched.case.q_len == 3
    assert not searched.cut
