"""The history of several records: changes are found where they are, small steps add up, noise is none."""

import json

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


def test_searched_cases_are_not_counted():
    plain, searched = record(), record(minimal=True, rms=9.0)
    both = run(*plain.results, *searched.results)
    assert changes(plain, both) == []


def test_the_json_is_strict_and_holds_every_number():
    found = history([Entry("old", record()), Entry("new", record(worst=float("inf")))])
    data = json.loads(render_json(found), parse_constant=pytest.fail)
    assert [each["label"] for each in data["records"]] == ["old", "new"]
    assert data["records"][1]["numbers"][0]["worst_ratio"] == "inf"
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
