"""The command `attest mutants`: what it scores, what it writes, and its exit status."""

import json

import pytest

from attest.conformance.cli.commands import main
from attest.conformance.mutants import run
from attest.conformance.mutants.catalogue import load
from attest.conformance.mutants.verdict import Score

DEFECT, REWRITE = "causal_top_left", "comparisons_negated"


@pytest.fixture
def scores(monkeypatch):
    """What becomes of each mutant, by name; "" survives or passes."""
    how = {DEFECT: "wrong", REWRITE: ""}

    def performed(_work, jobs, _workers, _left_out=None):
        for mutant, profile, seed in jobs:
            kill = {"how": "wrong", "check": "forward", "case": {"q_len": 2}, "message": "off\nby far"}
            named = (mutant.name, mutant.group, mutant.null, mutant.defect_class, profile, seed, 3)
            yield mutant.name, Score(*named, **(kill if how[mutant.name] else {}))

    monkeypatch.setattr(run, "_performed", performed)
    return how


def mutants(*options):
    return main(["mutants", "--only", DEFECT, "--only", REWRITE, *map(str, options)])


def test_several_seeds_and_profiles_are_scored_and_written(scores, tmp_path, capsys):
    files = {name: tmp_path / name for name in ("scores.json", "table.md", "kills.json")}
    options = ("--profile", "quick", "--profile", "standard", "--seed", 0, 1, 2)
    written = ("--json", files["scores.json"], "--table", files["table.md"], "--kills", files["kills.json"])
    assert mutants(*options, *written) == 0
    printed = capsys.readouterr()
    assert "profile quick, seeds 0, 1, 2\n  defects killed with every seed: 1 of 1" in printed.out
    assert f"1/12 {DEFECT} (seed 0, 3 results): killed by forward: off by far" in printed.err
    found = json.loads(files["scores.json"].read_text())["scores"]
    assert {(each["name"], each["profile"], each["seed"]) for each in found} == {
        (name, profile, seed)
        for name in (DEFECT, REWRITE)
        for profile in ("quick", "standard")
        for seed in (0, 1, 2)
    }
    assert "| quick | 0, 1, 2 | 1 of 1 |" in files["table.md"].read_text()
    kills = json.loads(files["kills.json"].read_text())
    assert kills[DEFECT]["quick"]["1"] == {"case": {"q_len": 2}, "check": "forward"}
    assert REWRITE not in kills


@pytest.mark.parametrize(("name", "how"), [(DEFECT, ""), (REWRITE, "wrong")])
def test_a_survivor_or_a_false_alarm_fails(scores, name, how, capsys):
    scores[name] = how
    assert mutants() == 1
    said = f"survived: {name} (seed 0)" if name == DEFECT else f"false alarm: {name}"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--only", "no_such"), "--only: no mutant is called 'no_such'"),
        (("--group", "no_such"), "--group: got 'no_such', expected clean_kernel, nulls, kernels"),
        (("--profile", "no_such"), "unknown profile 'no_such'"),
        (("--class", "no_such"), "--class: got 'no_such', expected one of alibi, arguments, "),
    ],
)
def test_a_wrong_option_is_one_sentence(options, message, capsys):
    assert main(["mutants", *options]) == 2
    assert message in capsys.readouterr().err


def test_scores_of_another_catalogue_are_refused(scores, tmp_path, capsys):
    path = tmp_path / "scores.json"
    path.write_text(json.dumps({"catalogue": {"nulls": "0"}, "scores": [], "skipped": {}}))
    assert mutants("--json", path) == 2
    assert "its scores are of the group nulls as 0" in capsys.readouterr().err
    path.write_text("{")
    assert mutants("--json", path) == 2
    assert "not valid JSON" in capsys.readouterr().err


def test_a_class_is_scored_without_what_was_made_for_it(scores, tmp_path, capsys):
    names = {name for name, mutant in load("clean_kernel").items() if mutant.defect_class == "causal"}
    scores.update({**dict.fromkeys(names, "wrong"), DEFECT: ""})
    path = tmp_path / "scores.json"
    assert main(["mutants", "--ablate", "causal", "--profile", "quick", "--json", str(path)]) == 1
    said = "only the cases and sizes made for the class causal kill 1 defect: causal_top_left"
    assert said in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert {each["name"] for each in found["scores"]} == names
    assert found["ablated"] == "causal"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("devices",), "--ablate: got 'devices', expected a class of clean_kernel: arguments, bias"),
        (("sinks", "--class", "sinks"), "--ablate names the defects to score: give no --group, --class"),
        (("sinks", "--rivals"), "--ablate names the defects to score"),
    ],
)
def test_a_class_that_cannot_be_left_out_is_refused(options, message, capsys):
    assert main(["mutants", "--ablate", *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
