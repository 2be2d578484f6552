"""The shards of a run, merged, are the run: whatever fails, and whatever each shard found simplest."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.conformance.cases.case import Case
from attest.conformance.record import Measurement, Verdict, merge_records
from attest.conformance.records.schema import record_to_json
from attest.conformance.running import runner
from attest.conformance.running.expectations import Expectation
from attest.conformance.running.gate import with_policy
from attest.conformance.running.plan import Task
from attest.conformance.running.runner import run
from tests.conformance.running.fakes import planned, request, result

IMPRECISE = (Measurement("out", 1, 2.0, 1.0, 1.0, 0.0, broken=("bound",)),)
MEANINGLESS = (Measurement("out", 1, 2.0, 1.0, 1.0, 0.0, broken=("bound", "semantics")),)
KNOWN = Expectation("toys.right", "forward", "known to fail", "https://example.org/1", case={"q_len": 2})

LENGTHS = st.integers(1, 6)
CASES = st.builds(
    lambda q_len, kv_len, seed: Case(q_len=q_len, kv_len=kv_len, seed=seed),
    LENGTHS,
    LENGTHS,
    st.integers(0, 3),
)
KINDS = st.sampled_from(["PASS", "imprecise", "meaningless", "raised", "died", "XFAIL"])


@given(
    kinds=st.dictionaries(CASES, KINDS, max_size=12),
    simplest=st.dictionaries(CASES, CASES, max_size=12),
    count=st.integers(1, 4),
)
def test_merged_shards_are_the_run(kinds, simplest, count):
    """Searches end at any case, drawn or not: what counts is that each begins with the same one."""

    def judge(subject, case, checks):
        kind = kinds[case]
        if kind == "PASS":
            return [result(case, check) for check in checks]
        numbers = {"imprecise": IMPRECISE, "meaningless": MEANINGLESS}.get(kind, ())
        phase = "running" if kind == "died" else ""
        return [result(case, check, Verdict.FAIL, measurements=numbers, phase=phase) for check in checks]

    def shrink(subject, failures, evaluations, seconds):
        return [
            replace(each.result, case=simplest.get(each.result.case, each.result.case), minimal=True)
            for each in failures
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "judge", judge)
        patch.setattr(runner, "shrink", shrink)
        planned(patch, *(Task("toys.right", case, ("forward", "gradients")) for case in kinds))
        parts = [run(request(shard=(number, count), expectations=(KNOWN,))) for number in range(1, count + 1)]
        whole = with_policy(run(request(expectations=(KNOWN,))), ())
    merged = with_policy(merge_records(parts), ())
    assert record_to_json(replace(merged, seconds=whole.seconds)) == record_to_json(whole)


def test_old_shards_keep_what_they_shrank():
    """Records of schema 1 do not say where a search began."""
    minimal = result(verdict=Verdict.FAIL, minimal=True)
    merged = merge_records([replace(run_of(minimal), shard=(1, 1))])
    assert merged.results == (minimal,)


def test_a_shard_that_was_cut_short_cuts_the_run_short_and_is_named():
    parts = [replace(run_of(result(Case(seed=seed))), shard=(seed, 3), seconds=1.5) for seed in (1, 2, 3)]
    cut = replace(parts[1], complete=False, note="stopped after its 9 seconds: 2 of 3 cases not judged")
    merged = merge_records([parts[0], cut, parts[2]])
    assert (merged.complete, merged.status) == (False, "fail")
    assert merged.note == "shard 2/3: stopped after its 9 seconds: 2 of 3 cases not judged"
    assert merged.seconds == 4.5


def test_what_shards_left_out_is_named_once():
    parts = [replace(run_of(), shard=(n, 2), left_out=("k lse: no lse", f"k of {n}")) for n in (1, 2)]
    assert merge_records(parts).left_out == ("k lse: no lse", "k of 1", "k of 2")


def run_of(*results):
    from attest.conformance.record import RunRecord

    return RunRecord("quick", 0, results)
