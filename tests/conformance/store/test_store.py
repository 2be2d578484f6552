"""A store: what is added once is there once, whole, and the ready queries say what the records say."""

import json
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.cli.commands import main
from attest.conformance.record import Measurement, Result, RunRecord, Verdict
from attest.conformance.records.lines import lines_of
from attest.conformance.records.record_file import write_record
from attest.conformance.store import add as adding
from attest.conformance.store.ask import StoreError, ask, queries
from attest.conformance.store.columns import TABLES, columns
from tests.meta.processes import ROOT

pytest.importorskip("duckdb")

DAY = datetime(2026, 11, 1)
CASE = Case(q_len=5, kv_len=7, head_dim=4, causal=True, seed=3)
MEASURED = Measurement("out", 40, 0.5, 0.7, 2.0, 0.1, size=40)


def result(verdict=Verdict.PASS, case=CASE, **fields):
    given = {"measurements": (MEASURED,), "message": "" if verdict is Verdict.PASS else 'it\'s "wrong"'}
    return Result("toys.right", "forward", ("S1",), case, verdict, **{**given, **fields})


def record(*results, commit="a", **fields):
    here = {"commit": commit, "device": "a CPU", "versions": {"jax": "0.11.2", "jaxlib": "0.11.2"}}
    return RunRecord("quick", 0, tuple(results), environment=here, **fields)


def add(store, found, day):
    return adding.add(store, lines_of(found, "here"), day)


def rows(store, sql, **given):
    answer = ask(store, sql, **given)
    return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]


def ready(store, name, **given):
    return rows(store, queries()[name].sql, **given)


def test_a_run_is_added_once_and_read_back(tmp_path):
    found = record(result(), result(Verdict.FAIL, replace(CASE, seed=4)), seconds=2.5)
    run = add(tmp_path, found, DAY)
    assert add(tmp_path, found, DAY + timedelta(days=1)) is None
    (of_run,) = rows(tmp_path, "SELECT * FROM runs")
    assert {*of_run} == {*columns("runs")}
    assert (of_run["run"], of_run["day"], of_run["results"], of_run["status"]) == (run, DAY, 2, "fail")
    assert json.loads(of_run["environment"])["versions"]["jax"] == of_run["jax"] == "0.11.2"
    passed, failed = rows(tmp_path, "SELECT * FROM results ORDER BY red")
    assert {*passed} == {*columns("results")}
    assert (passed["verdict"], passed["red"], passed["features"]) == ("PASS", False, ["causal"])
    assert (failed["verdict"], failed["red"], failed["message"]) == ("FAIL", True, 'it\'s "wrong"')
    assert passed["measurements"][0]["worst_ratio"] == 0.5
    assert json.loads(failed["case"]) == replace(CASE, seed=4).to_json()


def test_what_is_not_finite_is_kept(tmp_path):
    odd = replace(MEASURED, worst_ratio=float("inf"), rms_ratio=float("nan"))
    add(tmp_path, record(result(Verdict.FAIL, measurements=(odd,))), DAY)
    (row,) = rows(tmp_path, "SELECT unnest(measurements) AS m FROM results")
    assert row["m"]["worst_ratio"] == float("inf")
    assert row["m"]["rms_ratio"] != row["m"]["rms_ratio"]


def test_a_run_without_results_and_one_without_measurements_are_tables_too(tmp_path):
    add(tmp_path, record(), DAY)
    add(tmp_path, record(result(measurements=())), DAY)
    assert rows(tmp_path, "SELECT count(*) AS n FROM runs") == [{"n": 2}]
    assert rows(tmp_path, "SELECT measurements FROM results") == [{"measurements": []}]


def test_since_when_a_case_fails_is_the_first_run_after_it_last_passed(tmp_path):
    fates = (Verdict.FAIL, Verdict.PASS, Verdict.TIMEOUT, Verdict.FAIL)
    for number, verdict in enumerate(fates):
        other = result(Verdict.FAIL if number == 0 else Verdict.PASS, replace(CASE, seed=9))
        add(tmp_path, record(result(verdict), other, commit="abcd"[number]), DAY + timedelta(days=number))
    (row,) = ready(tmp_path, "failing")
    assert row["case_id"] == CASE.id
    assert (row["since"], row["since_commit"], row["since_jax"]) == (DAY + timedelta(days=2), "c", "0.11.2")
    assert (row["until"], row["until_commit"], row["runs"]) == (DAY + timedelta(days=3), "d", 2)
    assert row["verdict"] == "FAIL"
    request = json.loads(row["replay"].removeprefix("attest replay '").removesuffix("'"))
    assert request == {"case": CASE.to_json(), "check": "forward", "subject": "toys.right"}
    assert ready(tmp_path, "failing", subject="toys.*") == [row]
    assert ready(tmp_path, "failing", subject="triton.*") == []


def test_the_ratio_of_an_output_over_the_runs(tmp_path):
    for number in range(2):
        larger = replace(MEASURED, worst_ratio=0.5 + number)
        one = result(measurements=(larger, replace(MEASURED, output="lse")))
        add(tmp_path, record(one, result(case=replace(CASE, seed=8))), DAY + timedelta(days=number))
    found = ready(tmp_path, "ratio", output="out")
    assert [(row["day"], row["worst_ratio"], row["results"]) for row in found] == [
        (DAY, 0.5, 2),
        (DAY + timedelta(days=1), 1.5, 2),
    ]
    assert {row["output"] for row in ready(tmp_path, "ratio")} == {"out", "lse"}
    assert [(row["verdict"], row["results"]) for row in ready(tmp_path, "verdicts")] == [("PASS", 2)] * 2
    assert len(ready(tmp_path, "runs")) == 2


def test_results_whose_run_was_not_added_to_its_end_do_not_count(tmp_path):
    run = add(tmp_path, record(result()), DAY)
    other = add(tmp_path, record(result(Verdict.FAIL)), DAY)
    (tmp_path / "runs" / f"{other}.parquet").unlink()
    assert rows(tmp_path, "SELECT DISTINCT run FROM results") == [{"run": run}]
    assert add(tmp_path, record(result(Verdict.FAIL)), DAY) == other
    assert rows(tmp_path, "SELECT count(*) AS n FROM results") == [{"n": 2}]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT nothing FROM runs", 'Referenced column "nothing" not found'),
        ("SELECT * FROM read_text('/etc/hostname')", "file system operations are disabled"),
        ("COPY runs TO '/tmp/stolen.csv'", "file system operations are disabled"),
        ("SELEC", "syntax error"),
    ],
)
def test_a_wrong_query_and_one_of_other_files_are_refused(tmp_path, sql, message):
    add(tmp_path, record(result()), DAY)
    with pytest.raises(StoreError, match=message):
        ask(tmp_path, sql)


def test_pages_name_every_column_and_every_query():
    page = (ROOT / "docs" / "reference" / "store.md").read_text()
    for table in TABLES:
        for name, (kind, words) in columns(table).items():
            assert f"| `{name}` | `{kind}` | {words} |" in page, (table, name)
    for name, query in queries().items():
        assert f"| `{name}` | {query.words} |" in page


def written(folder, name, found):
    write_record(found, folder / name)
    return str(folder / name)


def test_the_commands_add_and_ask(tmp_path, capsys):
    store = str(tmp_path / "store")
    first = written(tmp_path, "a.json", record(result()))
    second = written(tmp_path, "b.json", record(result(Verdict.FAIL), commit="b"))
    assert main(["store", "add", store, first, "--day", "2026-11-01"]) == 0
    assert main(["store", "add", store, first, second, "--day", "2026-11-02"]) == 0
    said = capsys.readouterr().out
    assert f"{first}: the store has it already" in said
    assert f"{second}: added as run " in said
    assert main(["query", store]) == 0
    assert "failing: the cases that fail" in capsys.readouterr().out
    assert main(["query", store, "failing"]) == 0
    shown = capsys.readouterr().out
    assert "since: 2026-11-02\nsince_commit: b\n" in shown
    assert 'message: it\'s "wrong"\n' in shown
    csv, plot = tmp_path / "a.csv", tmp_path / "a.svg"
    assert main(["query", store, "ratio", "--output", "out", "--csv", str(csv), "--plot", str(plot)]) == 0
    head, *lines = csv.read_text().splitlines()
    assert head.startswith("day,commit,jax,device,subject,dtype,output,worst_ratio")
    assert len(lines) == 2
    assert "toys.right float32 out" in plot.read_text()
    assert main(["query", store, "--sql", "SELECT count(*) AS n FROM results"]) == 0
    assert capsys.readouterr().out.split()[-4:] == ["n", "2", "1", "row"]


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz"])
def test_the_lines_of_a_record_are_the_same_run(tmp_path, capsys, name):
    found = record(result(Verdict.FAIL), result(), seconds=2.5)
    first, second = written(tmp_path, "a.json", found), written(tmp_path, name, found)
    assert main(["store", "add", str(tmp_path / "store"), first, second, "--day", "2026-11-01"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"{second}: the store has it already"


def test_bad_input_is_one_sentence(tmp_path, capsys):
    store = str(tmp_path / "store")
    whole = written(tmp_path, "a.json", record(result()))
    cut = written(tmp_path, "b.json", record(result(), complete=False, note="interrupted"))
    (tmp_path / "c.json").write_text((tmp_path / "a.json").read_text()[:200])

    def says(*arguments):
        assert main(list(arguments)) == 2
        return capsys.readouterr().err

    assert "its run was cut short, so it is not added: interrupted" in says("store", "add", store, whole, cut)
    assert "not valid JSON" in says("store", "add", store, whole, str(tmp_path / "c.json"))
    assert not (tmp_path / "store").exists()
    assert "no store: it has no files runs/*.parquet" in says("query", store, "runs")
    damaged = tmp_path / "d.jsonl"
    written(tmp_path, damaged.name, record(result()))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b",")
    assert "d.jsonl: broken record, line 2: not valid JSON" in says(
        "store", "add", store, whole, str(damaged)
    )
    assert not (tmp_path / "store").exists()
    assert "no query is called 'failin': did you mean failing" in says("query", store, "failin")
    assert "there is the query runs, too" in says("query", store, "runs", "--sql", "SELECT 1")
    picture = str(tmp_path / "a.svg")
    assert "only these queries have one: ratio, verdicts" in says("query", store, "runs", "--plot", picture)


def test_a_store_of_a_newer_schema_is_refused(tmp_path, capsys):
    store, path = tmp_path / "store", written(tmp_path, "a.json", record(result()))
    assert main(["store", "add", str(store), path]) == 0
    (store / "schema.json").write_text('{"schema": "attest.store/2"}')
    capsys.readouterr()
    for command in (["store", "add", str(store), path], ["query", str(store), "runs"]):
        assert main(command) == 2
        message = (
            f"{store}: its schema is 'attest.store/2', and this version of attest reads 'attest.store/1'"
        )
        assert capsys.readouterr().err == f"attest: {message}\n"
    (store / "schema.json").write_text("{")
    assert main(["query", str(store), "runs"]) == 2
    assert "schema.json: not valid JSON" in capsys.readouterr().err


def test_without_duckdb_one_sentence_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("attest.conformance.cli.store.find_spec", lambda _name: None)
    assert main(["query", str(tmp_path)]) == 2
    assert "pip install 'attest-attention[store]'" in capsys.readouterr().err
