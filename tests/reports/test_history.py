"""The history of several records: changes are found where they are, small steps add up, noise is none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attest.conformance.cli.commands import main
from attest.conformance.record import Verdict
from attest.conformance.records.record_file import write_record
from attest.reports.history import Entry, history
from attest.reports.render.history import render_json
from tests.reports.records import case, measurement, result, run


def record(rms=0.7, worst=0.4, verdict=Verdict.PASS, seeds=range(12), **more):
    """A run of several cases with the same numbers."""
    numbers = measurement(rms_ratio=rms, worst_ratio=worst)
    results = [result(verdict, numbers, asked=case(seed=seed), **more) for seed in seeds]
    return run(*results)


def changes(*records):
    """(index, since, statistic, worse) of every change."""
    found = history([Entry(f"{number}", each) for number, each in enumerate(records)])
    return [(each.index, each.since, each.statistic, each.worse) for each in found.changes]


def test_equal_records_have_no_change():
    assert changes(record(), record(), record()) == []


def test_noise_is_no_change():
    assert changes(record(0.7), record(0.72), record(0.69)) == []


def test_a_change_is_in_the_record_where_it_happens_and_is_told_once():
    found = changes(record(), record(), record(2.1), record(2.1))
    assert {(index, worse) for index, _, _, worse in found} == {(2, True)}
    assert {statistic for _, _, statistic, _ in found} == {"rms_ratio", "rms_median"}


def test_a_mend_is_a_change_for_the_better():
    found = changes(record(), record(2.1), record())
    assert {(index, since, worse) for index, since, _, worse in found} == {(1, 0, True), (2, 1, False)}


def test_small_steps_in_one_direction_add_up():
    steps = [record(0.7 * 1.04**step) for step in range(20)]
    found = changes(*steps)
    assert found
    assert all(worse and index - since > 1 for index, since, _, worse in found)


def test_verdicts_that_change_are_counted():
    found = history([Entry("old", record()), Entry("new", record(verdict=Verdict.FAIL, message="off"))])
    assert "our.kernel forward: 12 cases PASS -> FAIL" in found.changes_in(1)


def test_a_failure_of_which_no_simpler_case_was_found_is_told():
    failing = [replace(each, verdict=Verdict.FAIL, message="off") for each in record().results]
    failing[0] = replace(failing[0], minimal=True, shrunk_from=failing[0].case.id)
    found = history([Entry("old", record()), Entry("new", run(*failing))])
    assert "our.kernel forward: 12 cases PASS -> FAIL" in found.changes_in(1)


def test_a_search_that_the_clock_cut_is_ignored():
    cut = result(Verdict.FAIL, measurement(worst_ratio=90.0), asked=case(seed=99), cut=True)
    found = history([Entry("old", record()), Entry("new", run(*record().results, cut))])
    assert (found.changes, found.changes_in(1), found.series()) == ((), [], [])


def test_passes_that_are_gone_and_outputs_that_are_wrong_too_are_told():
    wrong = measurement(broken=("bound",))
    right = measurement("lse")
    old = run(*record().results, result(Verdict.FAIL, wrong, right, asked=case(seed=50)))
    new = run(
        *record().results[2:],
        result(Verdict.FAIL, wrong, replace(right, broken=("bound",)), asked=case(seed=50)),
    )
    assert history([Entry("old", old), Entry("new", new)]).changes_in(1) == [
        "our.kernel forward: 2 cases PASS before and gone",
        "our.kernel forward: lse is wrong now, too, on 1 case that failed before",
    ]


def test_a_series_has_a_number_for_each_record():
    mixed = [replace(each, verdict=Verdict.XFAIL) for each in record().results[:2]]
    entries = [record(), run(*mixed, *record().results[2:]), run(result(check="lse")), record(2.1)]
    found = history([Entry(str(index), each) for index, each in enumerate(entries)])
    assert found.series() == [
        "our.kernel forward bfloat16: PASS 12 10 - 12",
        "our.kernel forward bfloat16: XFAIL 0 2 - 0",
        "our.kernel lse bfloat16: PASS - - 1 -",
        "our.kernel forward bfloat16 out: max rms ratio 0.7 0.7 - 2.1",
        "our.kernel forward bfloat16 out: median rms ratio 0.7 0.7 - 2.1",
    ]
    assert history([Entry("old", record()), Entry("new", record())]).series() == []


def test_numbers_change_apart_from_each_other():
    """The rms changes in one record and err/bound in another: each is compared with where it last changed."""
    found = changes(record(), record(2.1), record(2.1, 0.95), record(0.7, 0.95))
    assert [(index, since, worse) for index, since, name, worse in found if name == "rms_ratio"] == [
        (1, 0, True),
        (3, 1, False),
    ]
    assert [(index, since, worse) for index, since, name, worse in found if name == "worst_ratio"] == [
        (2, 0, True)
    ]


def test_searched_cases_are_not_counted():
    plain, searched = record(), record(minimal=True, rms=9.0)
    both = run(*plain.results, *searched.results)
    assert changes(plain, both) == []


def test_the_json_is_strict_and_holds_every_number():
    found = history([Entry("old", record()), Entry("new", record(worst=float("inf")))])
    data = json.loads(render_json(found), parse_constant=pytest.fail)
    assert [each["label"] for each in data["records"]] == ["old", "new"]
    assert data["records"][1]["numbers"][0]["worst_ratio"] == "inf"
    assert data["records"][0]["verdicts"] == [
        {"subject": "our.kernel", "check": "forward", "dtype": "bfloat16", "PASS": 12}
    ]
    assert [(each["statistic"], each["worse"]) for each in data["changes"]] == [("worst_ratio", True)]


def test_the_command_reads_files_and_folders_in_order(tmp_path, capsys):
    for name, rms in (("1.json", 0.7), ("2.json", 2.1)):
        write_record(record(rms), tmp_path / name)
    assert main(["history", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.index("1.json") < printed.index("2.json") < printed.index("max rms ratio 0.7 -> 2.1")
    assert printed.splitlines()[-1] == "2 records: 2 changes of numbers, 2 for the worse"
    assert main(["history", str(tmp_path / "1.json")]) == 2
    assert "a history needs at least two records, got 1" in capsys.readouterr().err


def test_a_folder_is_read_in_the_order_of_its_numbers_without_journals(tmp_path, capsys):
    for name in ("run10.json", "run9.json", "run9.jsonl"):
        write_record(record(), tmp_path / name)
    (tmp_path / "run9.json.journal").write_text("not a record")
    (tmp_path / "notes.txt").write_text("neither")
    assert main(["history", str(tmp_path)]) == 0
    labels = [Path(line.partition(":")[0]).name for line in capsys.readouterr().out.splitlines()]
    assert labels[:3] == ["run9.json", "run9.jsonl", "run10.json"]


def test_a_file_of_a_folder_that_is_no_record_is_named(tmp_path, capsys):
    write_record(record(), tmp_path / "1.json")
    (tmp_path / "2.json").write_text("{}")
    assert main(["history", str(tmp_path)]) == 2
    assert "2.json" in capsys.readouterr().err


def test_the_terminal_shows_each_series_below_the_records(tmp_path, capsys):
    for name, rms in (("1.json", 0.7), ("2.json", 2.1)):
        write_record(record(rms), tmp_path / name)
    assert main(["history", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "\nWhat changed, in each record from the first to the last:\n" in printed
    assert "  our.kernel forward bfloat16 out: max rms ratio 0.7 2.1\n" in printed
