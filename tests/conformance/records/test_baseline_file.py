"""The file of a baseline holds a record without loss; records are kept where they belong."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attest.conformance.record import RunRecord, Verdict
from attest.conformance.records.baseline_file import baseline_text
from attest.conformance.records.line_format import read_lines
from attest.conformance.records.record_file import read_record, record_text
from attest.reports import baselines
from attest.reports.compare import compare_records
from attest.reports.render import markdown
from tests.reports.records import case, example_base, example_head, measurement, result, run

# Results of one run, in the form of schema 1: PASS with and without numbers, MISTRUSTED, UNSUPPORTED.
OLD = Path(__file__).parent / "data" / "run1.json"


def written(record: RunRecord, folder: Path) -> Path:
    path = folder / "baseline.jsonl"
    path.write_text(baseline_text(record))
    return path


def kept(record: Path, folder: Path):
    return CliRunner().invoke(baselines.app, ["keep", str(record), "--folder", str(folder)])


RECORDS = {"old": read_record(OLD), "base": example_base(), "head": example_head()}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_is_read_as_it_was_written(record: RunRecord, tmp_path: Path) -> None:
    again = read_record(written(record, tmp_path))
    assert replace(again, results=()) == replace(record, results=())
    assert again.results == tuple(sorted(record.results, key=lambda each: each.sort_key))
    assert record_text(again) == record_text(record)


def test_the_old_form_and_the_new_one_load_alike(tmp_path: Path) -> None:
    old = read_record(OLD)
    new = read_record(written(old, tmp_path))
    assert new == old
    assert {each.verdict for each in new.results} == {Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.UNSUPPORTED}
    assert markdown.render_run(new) == markdown.render_run(old)
    assert not compare_records(old, new).regressed
    assert compare_records(old, new).both == len(old.results)


def test_an_old_baseline_is_compared_on_the_cases_that_both_runs_have(tmp_path: Path) -> None:
    base = read_record(OLD)
    measured = next(each for each in base.results if each.measurements)
    worse = replace(measured.measurements[0], worst_ratio=0.99, elements=4096)
    shared = replace(measured, measurements=(worse, *measured.measurements[1:]))
    other = replace(measured, case=replace(measured.case, seed=1))
    # Another seed: what only one of them was asked is no loss.
    head = read_record(written(replace(base, seed=1, results=(shared, other)), tmp_path))
    comparison = compare_records(base, head)
    assert comparison.both == 1
    assert [p.case_id for p in comparison.pairs if not p.base] == [other.case.id]
    assert {shift.pair.case_id for shift in comparison.shifts} <= {measured.case.id}


def test_a_baseline_holds_no_times() -> None:
    assert "seconds" not in baseline_text(run(result(seconds=1.5)))


def test_a_result_is_one_line_without_what_is_at_its_default(tmp_path: Path) -> None:
    plain = result(Verdict.PASS, measurement(), asked=case(1))
    full = replace(
        result(Verdict.FAIL, measurement(broken=("bound",)), asked=case(2)),
        message="wrong",
        minimal=True,
        shrunk_from="abc",
        phase="compiling",
        link="https://example.org",
    )
    record = run(plain, full)
    header, *lines = map(json.loads, baseline_text(record).splitlines())
    assert header["results"] == 2
    assert {"environment", "profile", "seed"} <= header.keys()
    by_verdict = {line["verdict"]: line for line in lines}
    assert by_verdict["PASS"].keys() == {"subject", "check", "clauses", "case", "verdict", "measurements"}
    assert not {"broken", "worst"} & by_verdict["PASS"]["measurements"][0].keys()
    assert read_lines(baseline_text(record).encode(), "here") == replace(
        record, results=tuple(sorted(record.results, key=lambda each: each.sort_key))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:-1], "broken record, line 7: it is missing, the header names 6 results"),
        (lambda lines: [*lines, lines[-1]], "broken record, line 8: more results than the header names, 6"),
        (lambda lines: [*lines[:-1], lines[-1][:-9]], "broken record, line 7: not valid JSON"),
        (lambda lines: [*lines[:-1], "{}"], "broken record, line 7: object missing required field"),
        (lambda lines: [lines[0].replace('"seed":0,', ""), *lines[1:]], "broken record, line 1: object"),
    ],
)
def test_a_broken_baseline_is_refused_in_one_sentence(change, message: str, tmp_path: Path) -> None:
    lines = baseline_text(read_record(OLD)).splitlines()
    path = tmp_path / "baseline.jsonl"
    path.write_text("".join(f"{line}\n" for line in change(lines)))
    with pytest.raises(ValueError, match=message) as caught:
        read_record(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_record_is_kept_by_device_profile_and_subject(tmp_path: Path) -> None:
    done = kept(OLD, tmp_path)
    assert done.exit_code == 0, done.output
    path = tmp_path / "nvidia-h200" / "standard" / "pallas.mosaic_gpu.jsonl"
    assert done.output.split() == [str(path)]
    assert read_record(path) == read_record(OLD)
    assert kept(path, tmp_path).exit_code == 0, "a baseline may be kept again"


PLACE = {"device": "Toy 1", "commit": "abc"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (run(environment=PLACE), "the run did not pass"),
        (run(result(Verdict.FAIL), environment=PLACE), "the run did not pass"),
        (run(result(), environment=PLACE, complete=False), "the run did not pass"),
        (run(result(), environment=PLACE, narrowed="--dtype float32"), "narrowed by --dtype float32"),
        (run(result(), environment=PLACE, shard=(1, 2)), "one shard of several"),
        (run(result(), result(subject="other"), environment=PLACE), "of 2 subjects, expected 1"),
        (run(result(), environment={"commit": "abc"}), "names no device"),
        (run(result(), environment={"device": "Toy 1"}), "commit is unknown: set ATTEST_COMMIT"),
        (run(result(), environment=PLACE | {"commit": "abc+dirty"}), "has changes that are not committed"),
    ],
)
def test_what_is_no_baseline_is_not_kept(record: RunRecord, message: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(record_text(record))
    done = kept(path, tmp_path / "kept")
    assert done.exit_code == 1
    assert done.output.startswith(f"{path}: not kept as a baseline: ")
    assert message in done.output
    assert not (tmp_path / "kept").exists()


def test_baselines_are_made_by_attest_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each subject in each profile; a run that does not pass is named, and spoils no other."""
    commands: list[list[str]] = []

    def check(command: list[str], **_: object):
        commands.append(command)
        *_, subject, _, profile, _, _workers, _, path = command
        record = replace(read_record(OLD), profile=profile)
        Path(path).write_text(record_text(record))
        return type("Done", (), {"returncode": int(subject == "broken")})

    monkeypatch.setattr(baselines, "_commit_here", lambda: "abc")
    monkeypatch.setattr(baselines.subprocess, "run", check)
    arguments = ["make", "broken", "pallas.mosaic_gpu", "--workers", "4", "--folder", str(tmp_path)]
    done = CliRunner().invoke(baselines.app, arguments)
    assert done.exit_code == 1
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jsonl"))
    assert names == [
        "nvidia-h200/production/pallas.mosaic_gpu.jsonl",
        "nvidia-h200/standard/pallas.mosaic_gpu.jsonl",
    ]
    assert [command[:4] for command in commands] == [[sys.executable, "-m", "attest", "check"]] * 4
    assert [tuple(command[4:9]) for command in commands] == [
        (subject, "--profile", profile, "--workers", "4")
        for subject in ("broken", "pallas.mosaic_gpu")
        for profile in ("standard", "production")
    ]
    text = "not kept: broken in the profile standard, exit status 1; broken in the profile production"
    assert text in done.output


def test_no_run_is_begun_whose_commit_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Found in the end, it would cost the whole run."""
    monkeypatch.setenv("PATH", str(tmp_path))  # without git, of which the commit is asked
    monkeypatch.delenv("ATTEST_COMMIT", raising=False)
    done = CliRunner().invoke(baselines.app, ["make", "xla.attention"])
    assert done.exit_code == 1
    assert done.output == (
        "no baseline can be made here: the commit is unknown: set ATTEST_COMMIT where there is no checkout\n"
    )
    monkeypatch.setenv("ATTEST_COMMIT", "abc")
    assert baselines._commit_here() == "abc"
