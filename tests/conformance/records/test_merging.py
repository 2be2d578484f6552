"""Shards that are merged a line at a time give the record that they give when they are merged in memory."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.conformance.cases.case import Case
from attest.conformance.record import (
    Measurement,
    Picture,
    Result,
    RunRecord,
    Verdict,
    merge_records,
    with_problems,
)
from attest.conformance.records.baseline_file import baseline_text
from attest.conformance.records.line_format import all_lines, header_line, result_line
from attest.conformance.records.lines import open_lines
from attest.conformance.records.merging import MergedLines, merge_lines
from attest.conformance.records.record_file import write_record
from attest.conformance.running.expectations import Expectation, Matches
from attest.conformance.running.gate import policy_problems, with_policy

CASES = tuple(Case(q_len=1 + number % 3, seed=number) for number in range(5))
IMPRECISE = (Measurement("out", 1, 2.0, 1.0, 1.0, 0.0, broken=("bound",)),)
MEANINGLESS = (Measurement("out", 1, float("inf"), 1.0, 1.0, 0.0, broken=("bound", "semantics")),)
PICTURE = Picture(0, 0, 1, 1, 0, 0, 0, 0, 1, ("#",), (".",))
KNOWN = tuple(
    Expectation(subject, "forward", f"known {shows}", "https://example.org/1", case=case, shows=shows)
    for subject in ("a", "b")
    for shows, case in (("always", {"q_len": 2}), ("sometimes", {}))
)

RESULTS = st.builds(
    lambda begun, **fields: Result(clauses=("S1",), shrunk_from=begun and begun.id, **fields),
    subject=st.sampled_from(["a", "b"]),
    check=st.sampled_from(["forward", "gradients", "purity"]),
    case=st.sampled_from(CASES),
    verdict=st.sampled_from(Verdict) | st.just(Verdict.FAIL),
    measurements=st.sampled_from([(), IMPRECISE, MEANINGLESS]),
    message=st.sampled_from(["", "raised"]),
    minimal=st.booleans(),
    begun=st.sampled_from(["", "", *CASES]),
    phase=st.sampled_from(["", "", "running"]),
    picture=st.sampled_from([None, PICTURE]),
    seconds=st.sampled_from([0.0, 1.5]),
)
SHARDS = st.lists(
    st.builds(
        RunRecord,
        profile=st.just("quick"),
        seed=st.just(0),
        results=st.lists(RESULTS, max_size=8).map(tuple),
        complete=st.sampled_from([True, True, False]),
        note=st.sampled_from(["", "cut short"]),
        problems=st.lists(st.sampled_from(["worse", "broken"]), max_size=2).map(tuple),
        left_out=st.lists(st.sampled_from(["k lse: no lse", "k other"]), max_size=2).map(tuple),
        seconds=st.sampled_from([0.0, 0.25]),
    ),
    min_size=1,
    max_size=4,
).map(lambda parts: [replace(p, shard=(n, len(parts))) for n, p in enumerate(parts, start=1)])
FORMS = ("run.jsonl", "run.jsonl.gz", "run.json")


def merged_by_lines(paths: Sequence[Path]) -> tuple[MergedLines, RunRecord]:
    """The lines, and their header with the problems of a whole run."""
    matches = Matches(KNOWN)
    merged = merge_lines([open_lines(path) for path in paths], matches.concern, matches.add)
    header = merged.header
    problems = policy_problems(header.profile, matches, merged.verdicts) if header.whole else ()
    return merged, with_problems(header, problems, judged=merged.count)


@given(parts=SHARDS, forms=st.lists(st.sampled_from(FORMS), min_size=4, max_size=4), swapped=st.booleans())
def test_shards_merge_to_the_same_record(tmp_path_factory, parts, forms, swapped):
    folder = tmp_path_factory.mktemp("shards")
    paths = [folder / f"{number}{form}" for number, form in zip(range(len(parts)), forms, strict=False)]
    for part, path in zip(parts, paths, strict=True):
        write_record(part, path)
    merged, header = merged_by_lines([*reversed(paths)] if swapped else paths)
    whole = with_policy(merge_records(parts), KNOWN)
    assert b"".join(merged.lines(header)) == b"".join(all_lines(whole))
    assert merged.count == len(whole.results)
    red = any(counts[verdict] for counts in merged.verdicts.values() for verdict in counts if verdict.red)
    assert red is any(result.verdict.red for result in whole.results)
    assert (whole.status == "fail") is bool(red or header.problems or not header.complete)


def shards(*records: RunRecord) -> list[RunRecord]:
    return [replace(record, shard=(n, len(records))) for n, record in enumerate(records, start=1)]


def run_of(*results: Result, **more) -> RunRecord:
    return RunRecord("quick", 0, results, **more)


def passes(start: int, count: int) -> tuple[Result, ...]:
    return tuple(
        Result("a", "forward", ("S1",), Case(seed=seed), Verdict.PASS) for seed in range(start, start + count)
    )


def failure(case: Case = CASES[0], **more) -> Result:
    return Result("a", "forward", ("S1",), case, Verdict.FAIL, message="raised", **more)


def written(folder: Path, *parts: RunRecord) -> list[Path]:
    paths = [folder / f"{number}.jsonl" for number in range(len(parts))]
    for part, path in zip(parts, paths, strict=True):
        write_record(part, path)
    return paths


def test_baselines_and_journals_are_merged_too(tmp_path):
    parts = shards(run_of(*passes(0, 3)), run_of(*passes(3, 3)))
    paths = written(tmp_path, *parts)
    paths[1].write_text(baseline_text(parts[1]))
    merged, header = merged_by_lines(paths)
    assert b"".join(merged.lines(header)) == b"".join(all_lines(with_policy(merge_records(parts), KNOWN)))


def test_passes_are_not_held_in_memory(tmp_path):
    paths = written(tmp_path, *shards(run_of(*passes(0, 1000)), run_of(failure(), *passes(1000, 1000))))
    merged_by_lines(paths)  # what is loaded once
    tracemalloc.start()
    merged, header = merged_by_lines(paths)
    size = sum(len(line) for line in merged.lines(header))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size > 200_000
    assert peak < size / 2


def test_shards_of_different_runs_are_refused(tmp_path):
    one, two = shards(run_of(), run_of())
    paths = written(tmp_path, one, replace(two, seed=1))
    with pytest.raises(ValueError, match="seed: got 1, expected 0"):
        merged_by_lines(paths)
    with pytest.raises(ValueError, match="shards: got 1/2, expected 1/2, 2/2"):
        merged_by_lines(paths[:1])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"clauses":["S1"]', b'"clauses":[1]', r"line 2, clauses\[0\]: expected `str`"),
        (b'"FAIL"', b'"FAIL","phase":"none"', r"line 2.phase: got 'none'"),
        (b'"case_id":"', b'"case_id":"0', f"line 2, case_id: got '0{CASES[0].id}', expected '{CASES[0].id}'"),
    ],
)
def test_a_broken_line_is_one_sentence(tmp_path, old, new, message):
    record = run_of(failure())
    path = tmp_path / "run.jsonl"
    line = result_line(record.results[0])
    assert old in line
    path.write_bytes(header_line(record, 1) + line.replace(old, new))
    with pytest.raises(ValueError, match=message) as caught:
        merged_by_lines([path])
    assert str(caught.value).startswith(f"{path}: broken record, ")
